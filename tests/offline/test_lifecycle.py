"""The life of an ``LLM``: interrupts, threads, death of a child, and leaving nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zlm import LLM, SamplingParams
from zlm.errors import Internal, Overloaded, ZlmError

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = "The capital of France is"


def children() -> dict[int, str]:
    """Return the zlm processes that this process has started and that still run."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().decode().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid() and "zlm." in command and fields[0] != "Z":
            found[int(entry.name)] = command
    return found


def answer(llm: LLM) -> str:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_an_interrupt_ends_the_run_and_the_engine_stays_usable(llm: LLM) -> None:
    expected = answer(llm)
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    # Statistics may lag by what the answer took, never by so much: past this, the long run is on.
    enough = llm.stats().generation_tokens + 64
    pressed = threading.Event()

    def press_when_running() -> None:
        while llm._engine.stats().generation_tokens < enough:  # the lock is held by the run
            time.sleep(0.01)
        pressed.set()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_when_running).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 8, long, use_tqdm=False)
    assert pressed.is_set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert answer(llm) == expected
    assert llm.stats().success.get("abort", 0) >= 8


def test_two_in_one_process_made_in_threads(llm: LLM, open_llm: Callable[..., LLM]) -> None:
    made: list[LLM] = []
    maker = threading.Thread(target=lambda: made.append(open_llm()))
    maker.start()
    maker.join()  # the thread that made it has ended: its children must live on
    before = set(children())
    with made[0] as second:
        answers: list[str] = []
        users = [
            threading.Thread(target=lambda each=each: answers.append(answer(each)))  # type: ignore[misc]
            for each in (llm, second, second)
        ]
        for user in users:
            user.start()
        for user in users:
            user.join()
        assert len(answers) == 3 and len(set(answers)) == 1
        runtime = second._engine._runtime.path
        assert runtime.stat().st_mode & 0o777 == 0o700
    assert not runtime.exists()
    assert len(before) - len(children()) == 2
    with pytest.raises(ZlmError, match="shut down"):
        second.generate(PROMPT, GREEDY)
    second.shutdown()


@pytest.mark.parametrize("role", ["engine", "worker"])
def test_a_killed_child_is_an_error_not_a_hang(open_llm: Callable[..., LLM], role: str) -> None:
    before = children()
    llm = open_llm()
    mine = {pid: line for pid, line in children().items() if pid not in before}
    victim = next(pid for pid, line in mine.items() if f"zlm.{role}.process" in line)
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    killer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
    killer.start()
    with pytest.raises(Internal, match=f"{role}.*SIGKILL"):
        llm.generate([PROMPT] * 4, long, use_tqdm=False)
    assert children() == before
    with pytest.raises(Internal, match=role):
        llm.generate(PROMPT, GREEDY, use_tqdm=False)


def test_stop_start_and_sleep(tiny_path: Path) -> None:
    """Nothing of it is left while it sleeps; awake it answers as before; a handler may stop it."""
    before = children()
    with LLM(tiny_path, dtype="float32", device="cpu", cpu_threads=1) as llm:
        expected = answer(llm)
        assert llm.reset_prefix_cache() and answer(llm) == expected
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        llm.sleep()
        assert llm.is_sleeping() and children() == before
        with pytest.raises(Overloaded, match="wake_up"):
            answer(llm)
        with pytest.raises(ZlmError):
            list(stream)
        llm.wake_up()
        assert not llm.is_sleeping() and answer(llm) == expected
        llm.stop()
        with pytest.raises(Internal, match=r"start\(\) brings it up again"):
            answer(llm)
        llm.start()
        llm.start()
        assert answer(llm) == expected
        former = signal.signal(signal.SIGALRM, lambda *_: llm.shutdown())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(Internal, match="shut down"):
                while True:
                    answer(llm)
        finally:
            signal.signal(signal.SIGALRM, former)
    assert children() == before


def run_program(program: str, model: Path) -> subprocess.CompletedProcess[str]:
    prologue = f"from zlm import LLM, SamplingParams\nMODEL = {str(model)!r}\n"
    return subprocess.run(
        [sys.executable, "-c", prologue + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_program_that_never_shuts_down_leaves_nothing(smollm2_path: Path) -> None:
    done = run_program(
        """
        import os, pathlib
        llm = LLM(MODEL, dtype="float32", max_model_len=256)
        print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8),
                           use_tqdm=False)[0].outputs[0].text)
        print(llm._engine._group.pid("engine"), llm._engine._group.pid("worker"))
        print(llm._engine._runtime.path)
        """,
        smollm2_path,
    )
    assert done.returncode == 0, done.stderr
    text, pids, runtime = done.stdout.strip().rsplit("\n", 2)
    assert "Paris" in text
    for pid in pids.split():
        assert not Path("/proc", pid).exists()
    assert not Path(runtime).exists()
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_be_found_is_a_clear_error(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(ZlmError, match="nothing-here"):
        LLM(str(tmp_path / "nothing-here"))
    assert children() == before


def test_keywords(smollm2_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'max_modellen'; did you mean 'max_model_len'\?"):
        LLM(str(smollm2_path), max_modellen=5)
    with pytest.raises(ZlmError, match="max_num_seqs"):
        LLM(str(smollm2_path), max_num_seqs="many")  # type: ignore[arg-type]
    with pytest.raises(ZlmError, match="tensor-parallel-size"):
        LLM(str(smollm2_path), tensor_parallel_size=2)
