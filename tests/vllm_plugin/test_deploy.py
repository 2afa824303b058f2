"""vLLM's own parser reads the command lines of deploy/, and makes of them what they say."""

import pytest
import yaml

from deployment import DEPLOY, containers, needs_kubectl, rendered

cli = pytest.importorskip("vllm.entrypoints.launchers.cli_args", reason="vLLM 0.32 has its parser there")
argparse_utils = pytest.importorskip("vllm.utils.argparse_utils")


def check(arguments: list[str]) -> None:
    parsed = cli.make_arg_parser(argparse_utils.FlexibleArgumentParser()).parse_args(arguments)
    transfer = parsed.kv_transfer_config
    assert transfer.kv_connector == "CacheBlendConnector" and transfer.kv_role == "kv_both"
    assert transfer.kv_connector_extra_config["store"].startswith(("file://", "memory://"))
    assert parsed.served_model_name == ["served"] and parsed.enable_prefix_caching


@needs_kubectl
def test_the_overlay() -> None:
    check(containers(rendered("overlays/vllm"))["server"].args)


def test_the_charts_values() -> None:
    values = yaml.safe_load((DEPLOY / "kubernetes/production-stack.yaml").read_text())
    (model,) = values["servingEngineSpec"]["modelSpec"]
    arguments = [each.replace("$(POD_IP)", "10.0.0.1") for each in model["vllmConfig"]["extraArgs"]]
    check(["--model", model["modelURL"], "--enable-prefix-caching", *arguments])
