"""Messages and exit codes of errors on stderr."""

from __future__ import annotations

import inspect
from typing import Any

import click
import pytest

from winml.modelkit import errors
from winml.modelkit.cli._endings import exit_status
from winml.modelkit.cli._errors import WinMLCommand, is_out_of_memory, report_click_error

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.WinMLError)]


def run(raised: BaseException, *arguments: str) -> int:
    """Run a verb that ends with an error, and return its exit code."""

    def body(**_options: Any) -> None:
        raise raised

    command = WinMLCommand("verb", callback=body, params=[click.Option(["--debug"], is_flag=True)])
    try:
        code = command.main(args=list(arguments), prog_name="winml verb", standalone_mode=False)
    except click.exceptions.Exit as leave:
        code = leave.exit_code
    return int(code or 0)


@pytest.mark.parametrize("kind", CLASSES)
def test_command_ends_with_message_hint_and_exit_code(
    kind: type[errors.WinMLError], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of our errors is two lines on stderr and the exit code of its class; stdout stays empty."""
    assert kind.exit_code == run(kind("it broke", hint="Mend it."))
    assert ("", "error: it broke\nMend it.\n") == capsys.readouterr()


def test_command_error_names_its_step_and_needs_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    """The step stands before the message; without a hint there is no empty line."""
    error = errors.ExportError("it broke")
    error.step = "step 4 of 8, ONNX export"
    run(error)
    assert "error (step 4 of 8, ONNX export): it broke\n" == capsys.readouterr().err


def test_command_debug_shows_the_traceback_first(capsys: pytest.CaptureFixture[str]) -> None:
    """The traceback is printed only with --debug, and on stderr."""
    run(errors.InputError("it broke"), "--debug")
    words = capsys.readouterr().err
    assert words.startswith("Traceback (most recent call last):")
    assert words.endswith("error: it broke\n")
    run(errors.InputError("it broke"))
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("raised", "arrives"), [(ValueError, ValueError), (KeyboardInterrupt, click.Abort)])
def test_command_lets_other_errors_through(raised: type[BaseException], arrives: type[BaseException]) -> None:
    """A plain ValueError is a bug in our code; Ctrl-C, as click raises it, is handled by main."""
    with pytest.raises(arrives):
        run(raised())


def test_report_click_error_shows_the_verb_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    """The message about a wrong option names the help that lists the options."""
    command = click.Command("export", params=[click.Option(["--opset"])])
    with pytest.raises(click.NoSuchOption) as caught:
        command.main(args=["--opsat", "1"], prog_name="winml export", standalone_mode=False)
    assert 2 == report_click_error(caught.value)
    out, words = capsys.readouterr()
    assert "" == out
    assert words.startswith("error: No such option")
    assert "'winml export --help' shows" in words.splitlines()[-1]


def test_report_click_error_without_a_verb_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names no help."""
    assert 1 == report_click_error(click.ClickException("no"))
    assert "error: no\n" == capsys.readouterr().err


def test_unexpected_error_asks_for_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    """The message calls an unexpected error a bug of winml, and offers --debug unless it was used."""
    codes = [exit_status(lambda: {}["gone"], debug=False)]
    quiet = capsys.readouterr().err
    codes.append(exit_status(lambda: {}["gone"], debug=True))
    loud = capsys.readouterr().err
    assert [1, 1] == codes
    assert "internal error: KeyError: 'gone'" in quiet
    assert "Run it again with --debug" in quiet
    assert "Traceback" not in quiet
    assert "Traceback" in loud
    assert "Run it again" not in loud


@pytest.mark.parametrize("arguments", [["--text", ""], ["--text", "  "], ["--many", "a", "--many", ""]])
def test_command_takes_no_empty_text_for_a_value(arguments: list[str]) -> None:
    """An unset variable of a shell leaves an empty text; ignoring the option would be a guess."""
    params = [click.Option(["--text"]), click.Option(["--many"], multiple=True), click.Option(["--other"])]
    command = WinMLCommand("verb", callback=lambda **_options: None, params=[*params])
    with pytest.raises(click.BadParameter, match="the text is empty") as caught:
        command.main(args=arguments, standalone_mode=False)
    assert arguments[-2] in caught.value.format_message()
    assert command.main(args=["--text", "a", "--many", "b"], standalone_mode=False) is None


def _raised(error: Exception, earlier: Exception, *, with_cause: bool = False, without: bool = False) -> Exception:
    try:
        try:
            raise earlier
        except Exception as caught:
            if with_cause:
                raise error from caught
            if without:
                raise error from None
            raise error  # noqa: B904  # what is left open is the case
    except Exception as caught:
        return caught


def test_lack_of_memory_is_detected_behind_a_chained_error() -> None:
    """The error being handled is not the cause of an error raised from None or from another error."""
    assert is_out_of_memory(_raised(ValueError("it broke"), MemoryError()))
    assert is_out_of_memory(_raised(ValueError("it broke"), MemoryError(), with_cause=True))
    assert not is_out_of_memory(_raised(ValueError("it broke"), MemoryError(), without=True))
    other = _raised(ValueError("it broke"), MemoryError())
    other.__cause__ = KeyError("name")
    assert not is_out_of_memory(other)


@pytest.mark.parametrize("raised", [ValueError("it broke"), MemoryError()])
def test_circular_chain_of_errors_ends(raised: Exception) -> None:
    """A library may raise a stored error from another error, and the other error from the stored one."""
    other = KeyError("name")
    raised.__cause__, other.__cause__ = other, raised
    assert isinstance(raised, MemoryError) == is_out_of_memory(other)
