"""An environment that blocks its loop: the host lives on, names the line, and leaves at a limit."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.serving import byte_tokenizer

from polyrl.hosts.beside import LoopWatch, run_beside, run_in
from polyrl.scheduling.core.parameters import EnvironmentRules


def test_a_loop_that_stands_still_is_found_with_the_line_where_it_stands():
    async def wait_without_await() -> None:
        time.sleep(2.0)

    async def scenario() -> None:
        other = asyncio.new_event_loop()
        thread = threading.Thread(target=other.run_forever)
        thread.start()
        watch = LoopWatch(other, thread.ident or 0)
        watch.probe()
        await asyncio.sleep(0.2)
        assert watch.stuck_s == 0.0
        blocked = asyncio.run_coroutine_threadsafe(wait_without_await(), other)
        stuck_s, place = await watch.until_stuck(lambda: 1.0, lambda _s, _place: None)
        assert stuck_s >= 1.0
        assert "test_beside.py" in place and "wait_without_await" in place
        await asyncio.wrap_future(blocked)
        await asyncio.sleep(0.2)
        assert watch.stuck_s == 0.0
        other.call_soon_threadsafe(other.stop)

    asyncio.run(scenario())


def test_what_runs_beside_a_loop_gets_and_raises_what_was_asked_for_there():
    async def scenario() -> None:
        here = asyncio.get_running_loop()

        async def name() -> str:
            return threading.current_thread().name

        async def fail() -> None:
            raise ValueError("no")

        async def beside() -> tuple[str, str]:
            return await name(), await run_in(here, name())

        assert await run_beside(beside) == ("host", threading.current_thread().name)
        with pytest.raises(ValueError, match="no"):
            await run_beside(fail)

    asyncio.run(scenario())


@pytest.mark.timeout(120)
def test_a_host_whose_environment_blocks_says_that_it_lives_names_the_line_and_leaves(tmp_path: Path):
    pytest.importorskip("torch", reason="the validation desk is the trainer's, which environments of packages lack")
    from tests.integration.test_validation_desk import TASKS, TOKEN, desk

    (tmp_path / "blocking.py").write_text(
        "import time\n"
        "class Blocking:\n"
        "    async def begin(self, task, seed):\n"
        "        time.sleep(1000)\n"
        "    async def step(self, text):\n"
        "        pass\n"
    )
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "token").write_text(TOKEN)
    rules = EnvironmentRules(turn_timeout_s=14.0, host_timeout_s=3.0, max_attempts=1)

    async def scenario() -> tuple[int | None, bytes, list[bool]]:
        async with desk(rules) as made:
            argv = ("env", "play", "blocking:Blocking", "--modules", str(tmp_path), "--model", str(tmp_path))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "polyrl", *argv, "--join", made.url, "--token-file", str(tmp_path / "token")),
                stderr=asyncio.subprocess.PIPE,
                env=dict(os.environ),
            )
            playing = asyncio.create_task(made.play(TASKS[:2]))
            while not made.is_heard and process.returncode is None:
                await asyncio.sleep(0.1)
            heard: list[bool] = []
            for _ in range(10):
                await asyncio.sleep(0.5)
                heard.append(made.is_heard)
            _, said = await process.communicate()
            playing.cancel()
            return process.returncode, said, heard

    code, said, heard = asyncio.run(scenario())
    assert all(heard)
    assert code == 1
    last = said.decode().strip().splitlines()[-1]
    assert "environment blocking:Blocking blocks its episodes for" in last
    assert "blocking.py:4 (begin)" in last
