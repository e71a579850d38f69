"""Builds the CPU kernels whenever the package is built or installed, if there is a compiler.

Without one the wheel is pure Python: a worker then builds them on first use, or does without.
"""

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Leave the libraries in the source tree, from where wheels take them as artifacts."""
        sys.path.insert(0, str(Path(self.root) / "worker"))
        try:
            from kvasir.worker.kernels.build import BuildError, build_packaged
        finally:
            del sys.path[0]
        try:
            build_packaged()
        except BuildError as error:
            self.app.display_warning(f"the CPU kernels were not built: {error}")
            return
        if version == "standard":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["pure_python"] = False
