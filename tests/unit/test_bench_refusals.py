"""What a user is told of bad input: the option, the reason and the fix, and exit code 2."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from helpers.models import save_tiny
from kvasir.bench.cli import bench
from kvasir.bench.refusals import bad_model, blaming
from kvasir.bench.workload import WorkloadError


def refused(*arguments: str) -> str:
    """What the command says, on one line."""
    result = CliRunner().invoke(bench, list(arguments))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("message", "lengths", "told"),
    [
        (
            "model: /x does not exist; correct the path",
            "",
            "Invalid value for --model: /x does not exist; correct the path",
        ),
        (
            "activation_quantization: int8 activations cannot be multiplied; set quantization to "
            "int8, or activation_quantization to none",
            "",
            "Invalid value for --activation-quantization: int8 activations cannot be multiplied; "
            "set quantization to int8, or --activation-quantization to none",
        ),
        (
            "max_model_len: 9000 is beyond the model's 8192 tokens; set it to at most 8192",
            "--input-len",
            "Invalid value for --input-len: prompt and output together: 9000 is beyond the model's "
            "8192 tokens; give less",
        ),
        (
            "max_model_len: 2048 is beyond the model's 512 tokens; set it to at most 512",
            "",
            "Invalid value for --model: longest sequence: 2048 is beyond the model's 512 tokens; "
            "use another model",
        ),
        (
            "kv_cache_memory: 9 bytes cannot hold one sequence of max_model_len 8192 tokens; set "
            "it to at least 99, or lower max_model_len",
            "--input-len",
            "Invalid value for --model: KV cache: 9 bytes cannot hold one sequence of 8192 tokens; "
            "use another model, or lower --input-len",
        ),
        (
            "config.json: num_layers is missing; use the model's complete files",
            "",
            "Invalid value for --model: config.json: num_layers is missing; use the model's "
            "complete files",
        ),
    ],
)
def test_a_model_s_refusal_names_options(message: str, lengths: str, told: str) -> None:
    error = bad_model(message, lengths)
    assert (error.format_message(), error.exit_code) == (told, 2)


def test_the_option_at_fault_is_the_error_s_own_if_it_names_one() -> None:
    for own, option in (("", "--trace"), ("--max-total", "--max-total")):
        with pytest.raises(Exception, match="why") as caught, blaming("--trace"):
            raise WorkloadError("why", own)
        assert caught.value.format_message() == f"Invalid value for {option}: why"  # type: ignore[attr-defined]  # a BadParameter


@pytest.mark.parametrize(
    "command", ["batching", "chunking", "prefix", "speculation", "quality", "engine"]
)
def test_a_model_that_is_not_there(command: str, tmp_path: Path) -> None:
    missing = tmp_path / "model.gguf"
    told = refused(command, "--model", missing.as_uri())
    assert f"--model: {missing} does not exist; correct the path" in told


def test_a_length_beyond_the_model_s() -> None:
    for command, option in (
        ("batching", "--max-model-len"),
        ("chunking", "--input-len"),
        ("prefix", "--input-len"),
    ):
        extra = ("--prompts", "1") if command == "chunking" else ()
        told = refused(command, option, "1000000", *extra)
        assert f"Invalid value for {option}" in told
        assert "beyond the model's" in told
        assert "max_model_len" not in told


def test_prompts_that_take_longer_than_sequences_can_decode() -> None:
    told = refused("chunking", "--budgets", "9", "--prompts", "2", "--input-len", "1500")
    assert "--prompts: 2 prompts of 1500 tokens take 3000 steps of a budget of 9" in told
    assert "room for 2032: give fewer, or raise the smallest of --budgets" in told


def test_shared_parts_that_fill_no_block() -> None:
    told = refused("prefix", "--input-len", "17")
    assert "--input-len: of 17 tokens no shared part fills a block of 16 tokens" in told
    assert "give at least 18" in told


def test_outputs_without_a_second_token_cannot_be_timed() -> None:
    assert "--output-len" in refused("speculation", "--output-len", "1")


@pytest.mark.parametrize(
    ("arguments", "text", "told"),
    [
        (("speculation", "--prompts"), '{"text": "a"}', ":1: prompt is missing; each line is a"),
        (("speculation", "--prompts"), "\n", "no prompts in this file"),
        (("quality", "--questions"), '\n{"question": "a"}', ":2: answer is missing"),
        (("quality", "--text"), "Too short.", "fewer than 4 windows of 512"),
        (("exact", "--prompts"), '{"question": "a"}', ":1: answer is missing"),
        (("exact", "--prompts"), '{"question": "a", "answer": "b"}', "50 prompts and 50 worked"),
        (("kv", "--trace"), "TIMESTAMP\n", "a trace is a .jsonl (Mooncake) or .csv (Azure) file"),
    ],
)
def test_a_file_is_blamed_on_its_option(
    arguments: tuple[str, str], text: str, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "file.txt"
    file.write_text(text)
    said = refused(*arguments, str(file))
    assert f"Invalid value for {arguments[1]}: " in said
    assert told in said


def test_a_text_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"\xff\x00")
    assert "Invalid value for --text: " in refused("quality", "--text", str(file))


def test_quality_refuses_what_the_engine_has_no_room_for(tmp_path: Path) -> None:
    assert "--window: 9000 tokens are more" in refused("quality", "--window", "9000")
    questions = tmp_path / "questions.jsonl"
    row = '{"question": "How many?", "answer": "' + 200 * "One and " + '#### 7"}\n'
    questions.write_text(10 * row)
    told = refused("quality", "--questions", str(questions), "--shots", "8")
    assert "--shots: the longest prompt, 8 worked examples and a question, has " in told
    told = refused("quality", "--questions", str(questions), "--shots", "10")
    assert "--shots: 10 worked examples leave no question of 10 to ask" in told


def test_quality_refuses_a_tokenizer_that_is_not_served(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)  # whose tokens are whole words
    told = refused("quality", "--model", f"file://{tmp_path}")
    assert "Invalid value for --model: " in told
    assert "tokenizer" in told


def test_prefix_asks_a_small_model_for_no_more_than_its_prompts_take(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)  # of 512 positions
    model = f"--model=file://{tmp_path}"
    told = refused("prefix", model, "--input-len=600")
    assert "--input-len and --output-len: prompt and output together: 616 is beyond" in told
    told = refused("prefix", model, "--input-len=20", "--output-len=1")
    assert "a vocabulary of 160 tokens is too small" in told, "its positions are enough"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("quality", "--reference", "file:///nope"), "--reference: /nope does not exist; correct"),
        (("engine", "--rivals", "/nope"), "--rivals: there is no directory /nope: correct it"),
    ],
)
def test_a_place_that_is_not_there_is_the_fault_of_its_option(
    arguments: tuple[str, ...], told: str
) -> None:
    assert f"Invalid value for {told}" in refused(*arguments)
