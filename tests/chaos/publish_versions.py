"""A trainer that only publishes: `python publish_versions.py URL TOKEN_FILE NETWORK WORKERS VERSIONS`.

It waits for so many workers, publishes one version of 8 MB after the other once all of them have the one before, and
prints the seconds that each took.
"""

import asyncio
import sys
import time
from pathlib import Path

from tests.weights.stage import layout_of, weights

from polyrl.client import Prompt, connect
from polyrl.scheduling.core.parameters import DomainData, SchedulerConfig
from polyrl.weights.server import WeightServer
from polyrl.weights.settings import WeightSettings

NUM_ELEMENTS = 4_000_000


async def main(url: str, token_file: str, network: str, num_workers: int, num_versions: int) -> None:
    config = SchedulerConfig(domains=(DomainData(name="all", prompts_per_step=1, num_prompts=10),))
    token = Path(token_file).read_text(encoding="ascii").strip()
    async with connect(url, token, config, prompts=lambda *_: Prompt([5]), has_weights=True) as fleet:
        while len((await fleet.status()).workers) < num_workers:
            await asyncio.sleep(0.1)
        assert fleet.opened is not None
        settings = WeightSettings(interfaces=(network,), chunk_bytes=1 << 20, num_deltas=0)
        server = WeightServer(settings, bytes.fromhex(fleet.opened.weights_key))
        server.start()
        for version in range(num_versions):
            data, began = weights(version, NUM_ELEMENTS), time.monotonic()

            def fill(view: memoryview, data: bytes = data) -> None:
                view[:] = data

            offer = await asyncio.to_thread(server.publish, version, layout_of(NUM_ELEMENTS), fill)
            await fleet.publish(version, offer.digest, offer.addresses)
            while any(worker.version < version for worker in (await fleet.status()).workers):
                await asyncio.sleep(0.05)
            print(round(time.monotonic() - began, 2), flush=True)
        server.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
