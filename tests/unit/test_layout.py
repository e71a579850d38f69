"""The repository's layout is part of how it works; see docs/adr/0001."""

import operator
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("proto", "worker", "router", "operator", "cli", "bench")


def test_components_share_one_namespace() -> None:
    """An __init__.py in any */kvasir/ would hide the other components."""
    for component in COMPONENTS:
        assert (ROOT / component / "kvasir" / component / "__init__.py").is_file()
        assert not (ROOT / component / "kvasir" / "__init__.py").exists()


def test_operator_folder_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert operator.add(1, 2) == 3
    code = "import operator, kvasir.operator; print(operator.add(1, 2))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "3"
