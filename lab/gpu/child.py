"""The program of `process.measure_apart`."""

import json
import os
import sys

from transformers.utils import logging

from lab.gpu.parts import PARTS
from lab.gpu.process import Message, Task, measure_here


def main() -> None:
    """Measures the parts that its argument names, and tells what it finds through the pipe that it names."""
    asked = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with os.fdopen(asked["pipe"], "w") as pipe:

        def tell(message: Message) -> None:
            print(json.dumps(message), file=pipe, flush=True)

        measure_here(
            [Task(**task) for task in asked["tasks"]], asked["dry_run"], tell, lambda name: PARTS[name].measure
        )


if __name__ == "__main__":
    main()
