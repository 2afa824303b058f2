"""moto's S3 server on a free loopback port, for the tests that need a bucket.

Its limits: one process, no throttling, no partial failures, strong consistency; so nothing here says how fast a real
bucket is, or how it misbehaves beyond what a test makes it do.
"""

import atexit
import logging
from functools import cache
from importlib.util import find_spec

import pytest

needs_bucket = pytest.mark.skipif(
    find_spec("moto") is None or find_spec("obstore") is None, reason="needs moto[server] and obstore"
)
BUCKET = "passages"
KEYS = {"access_key_id": "testing", "secret_access_key": "testing", "region": "us-east-1"}


class Bucket:
    """A server with one bucket."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        self.options = {**KEYS, "endpoint": self.endpoint}
        client = self.client()
        client.create_bucket(Bucket=BUCKET)

    def client(self):  # type: ignore[no-untyped-def]
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
        )

    def stop(self) -> None:
        self._server.stop()


@cache
def bucket() -> Bucket:
    """One for all tests of this process; skips the test where it cannot be."""
    if needs_bucket.args[0]:
        pytest.skip(needs_bucket.kwargs["reason"])
    opened = Bucket()
    atexit.register(opened.stop)
    return opened
