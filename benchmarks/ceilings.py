"""A side that measures the machine, in the same run as the others: `forge.run.ceilings`.

python benchmarks/ceilings.py WORK DEVICE MODEL PRECISION B T THREADS   (of which it heeds DEVICE,
PRECISION and THREADS)
"""

import sys

from sides import Side, refuse, report

from forge.errors import ForgeError
from forge.run import ceilings, choices
from forge.tensor import Device


def main():
    side = Side.of(sys.argv[1:])
    try:
        device = Device(side.device)
        if side.threads:
            choices.use_threads(device, side.threads)
        report(**ceilings.measure(device, side.precision)._asdict())
    except ForgeError as error:
        refuse(str(error))


if __name__ == "__main__":
    main()
