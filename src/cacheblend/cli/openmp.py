"""How long OpenMP's threads spin while they wait for each other, in the process of a command.

By default GNU's runtime, torch's own, spins for some 15 ms, Intel's and LLVM's for 200: longer than the time after
which a busy system gives a core to somebody else, so that threads that wait use the time that the one they wait for
would get. A few milliseconds are more than what lies between two operations, and cost nothing on a quiet machine.
"""

import os
import sys

BOUNDED = {"GOMP_SPINCOUNT": "50000", "KMP_BLOCKTIME": "2"}
"""GNU's runtime counts turns, the others milliseconds; each ignores the other's."""


def bound_waiting() -> None:
    """Sets it in the environment, unless that says how threads wait. Has an effect before torch is loaded only."""
    if "torch" not in sys.modules and not any(name in os.environ for name in ("OMP_WAIT_POLICY", *BOUNDED)):
        os.environ.update(BOUNDED)
