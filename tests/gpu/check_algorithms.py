"""A sample of every loss x advantage x correction x aggregation x KL on a GPU: are steps those of the references?

python tests/gpu/check_algorithms.py [--device cuda|cpu] [--stride 23]

Whole steps of the table that tests/trainer/test_every_algorithm.py runs in full on the CPU, every second one with two
updates, against float64 references. A JSON line for each that is wrong, and one at the end: in float32 the largest
distance of a loss or a gradient, as a share, must be below 1e-5, else it ends with 1. Bfloat16 is there to see that it
runs, and is told: these wild little models are 0.01 away in the median, and where rounding turns a clip, 0.4.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [  # it is run as a file
    str(Path(__file__).parents[2] / "src"),
    str(Path(__file__).parents[2]),
]

from tests.trainer.table import TOLERANCE, Table, sample_of_cases  # noqa: E402


def main(device: str, stride: int) -> int:
    cases = sample_of_cases(stride)
    is_right = True
    for dtype in ("float32", "bfloat16"):
        table = Table(Path(tempfile.mkdtemp()), dtype, device, head_dim=64)
        apart = [table.distance(case) for case in cases]
        for case, distance in zip(cases, apart, strict=True):
            if dtype == "float32" and not distance < TOLERANCE:
                is_right = False
                print(json.dumps(case | {"distance": distance}), flush=True)
        told = {"device": device, "dtype": dtype, "cases": len(cases), "largest_distance": max(apart)}
        print(json.dumps(told | {"median": sorted(apart)[len(apart) // 2]}), flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--stride", type=int, default=23, help="every so many of about 3,000 cases")
    args = parser.parse_args()
    sys.exit(main(args.device, args.stride))
