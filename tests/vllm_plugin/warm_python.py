"""Stands in for the interpreter, as `sys.executable`: hands its arguments, environment, folder and open files to the
nursery, where a fork runs the program; passes signals on to it, and ends as it ends. See `nursery.py`.

It starts often, and imports little. `vllm_running.Nursery` writes ADDRESS, the nursery's socket, in front of it.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress


def main() -> None:
    files = []
    for number in range(500):  # `nursery.ABOVE`
        try:
            os.fstat(number)
        except OSError:
            continue
        files.append(number)
    folder = os.getcwd()  # noqa: PTH109
    asked = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": folder, "files": files}
    request = json.dumps(asked).encode()
    nursery = socket.socket(socket.AF_UNIX)
    nursery.connect(ADDRESS)  # noqa: F821
    socket.send_fds(nursery, [len(request).to_bytes(8, "big")], files)
    nursery.sendall(request)
    answer = nursery.makefile("r")
    pid = int(answer.readline())

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    for file in files:  # who waits for the end of one waits for the program
        os.close(file)
    ended = answer.readline()
    code = int(ended) if ended else -signal.SIGKILL
    if code < 0:
        if code not in (-signal.SIGKILL, -signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
