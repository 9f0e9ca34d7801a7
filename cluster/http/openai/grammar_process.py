"""A process that compiles grammars, which the system ends where one takes too much.

Some grammars of a few hundred characters take hours and gigabytes to compile, and the library does not look up until
it is through; a thread could not be ended. So there is a process that has read the tokenizer, and forks one that
compiles, with bounds on each grammar's processor time and on all memory. Where that one is ended, the next fork is
there in milliseconds.

The library spends two fifths of its time on allocations, so these are jemalloc's, where Ray brings it.

`cluster.http.openai.structured` starts it, once for each tokenizer of a process, and asks over pipes: a line of JSON
for each question and answer, and behind a question's the grammar as it was sent, which as JSON within JSON would be
written and read twice. It ends when its standard input does.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CPU_S: Final = 1.0  # processor time that one grammar may take
MEMORY: Final = 2 << 30  # bytes of addresses; Python and a tokenizer take a tenth of it


class CompilerProcess:
    """The gateway's end of the process that compiles grammars. Any thread may ask it."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._hello = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eos_token_ids": eos_token_ids}
        self._free = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process, for whoever looks at it from outside. None: it does not run."""
        return None if self._process is None else self._process.pid

    def ask(self, kind: str, text: str) -> dict[str, str]:
        """Have a grammar compiled. Returns `{"grammar": ...}` or `{"refused": a sentence}`, or `{}` if it took too
        much. The first question waits for the process to start, a second or two.
        Raises RuntimeError if it does not stay."""
        with self._free:
            for _ in range(2):  # somebody may have ended it since the last question
                try:
                    return self._asked(kind, text.encode("utf-8", "surrogatepass"))
                except (OSError, ValueError):
                    self._end()
        raise RuntimeError("the process that compiles grammars ended; its reason is in the gateway's log")

    def _asked(self, kind: str, text: bytes) -> dict[str, str]:
        """Ask the process, and start it if there is none. Raises OSError or ValueError if it is gone."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                start_new_session=True,  # an interrupt from the terminal is not its to answer
            )
            self._told(self._hello)
        return self._told({"kind": kind, "bytes": len(text)}, text)

    def _told(self, message: dict[str, Any], text: bytes = b"") -> dict[str, str]:
        """Send one message and return its answer. Nothing else is sent before that has come: a message that waits in
        the process's buffers would go to every fork."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        _write(self._process.stdin, message, text)
        answer: dict[str, str] = json.loads(self._process.stdout.readline())
        return answer

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@lru_cache(maxsize=4)
def compiler_process(tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> CompilerProcess:
    """The compiler process for a tokenizer. Everything in this process shares it."""
    return CompilerProcess(tokenizer, vocab_size, eos_token_ids)


def _environment() -> dict[str, str]:
    """The compiler's environment: this process's modules, and the quicker allocator before all that is there."""
    changed = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ray = find_spec("ray")
    jemalloc = f"{Path(ray.origin).parent}/core/libjemalloc.so" if ray is not None and ray.origin else ""
    # It is not in Ray's packages for all systems, and nothing quotes a path's blank or colon.
    if Path(jemalloc).is_file() and not {" ", ":"} & set(jemalloc):
        changed["LD_PRELOAD"] = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), jemalloc]))
    return os.environ | changed


def _write(pipe: IO[bytes], message: dict[str, Any], text: bytes = b"") -> None:
    pipe.write(json.dumps(message).encode() + b"\n" + text)
    pipe.flush()


# --- in the process ---


def main(questions: IO[bytes], answers: IO[bytes]) -> None:
    from cluster.http.openai.json_schemas import UnsupportedGrammarError
    from cluster.http.openai.structured import OutputConstraint, compiled
    from engine.sampling.grammar import grammar_tokenizer

    hello = json.loads(questions.readline())
    tokenizer: LLTokenizer | UnsupportedGrammarError
    try:
        tokenizer = grammar_tokenizer(hello["tokenizer"], hello["vocab_size"], tuple(hello["eos_token_ids"]))
    except ValueError as error:
        tokenizer = UnsupportedGrammarError(f"This model's tokenizer cannot follow a grammar: {error}.")
    _write(answers, {})

    def answer_to(kind: Any, text: str) -> dict[str, str]:
        try:
            if isinstance(tokenizer, UnsupportedGrammarError):
                raise tokenizer
            return {"grammar": compiled(OutputConstraint(kind, text, ""), tokenizer)}
        except UnsupportedGrammarError as error:
            return {"refused": str(error)}

    # A look for cycles among all that was read here takes longer than many a grammar: forks look among what is new.
    gc.freeze()
    gc.disable()
    while not _questions_end(questions, answers, answer_to):
        _write(answers, {})


def _questions_end(questions: IO[bytes], answers: IO[bytes], answer_to: Callable[[Any, str], dict[str, str]]) -> bool:
    """Answer questions in a fork.
    Returns True when there are no more, False if the fork was ended over the last one."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # by default this signal ends the process
        for line in questions:
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            question = json.loads(line)
            answer = answer_to(question["kind"], questions.read(question["bytes"]).decode("utf-8", "surrogatepass"))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            _write(answers, answer)
            gc.collect()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # the fork must not do what the first process would do at its end


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
