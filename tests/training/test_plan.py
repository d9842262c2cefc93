"""What the numbers of a config mean together for a number of processes."""

import pytest
import yaml

from tests.training.test_config import MODEL, one_line
from training.config.build import ConfigError, load_config, make_plan


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.yaml"
    values = {"model": MODEL, "data": {"seq_len": 64}, "train": {"steps": 200}}
    path.write_text(yaml.safe_dump(values))
    return path


def test_plan_divides_the_batch(file):
    config = load_config(file, ["train.micro_batch_size=4", "train.global_batch_size=32"])
    plan = make_plan(config, world_size=2, cuda=False)
    assert (plan.accumulation, plan.rows_per_rank, plan.tokens_per_step) == (4, 16, 32 * 64)
    assert (plan.device, plan.dtype, plan.compile) == ("cpu", "float32", False)
    plan = make_plan(config, world_size=8, cuda=True)
    assert (plan.accumulation, plan.device, plan.dtype, plan.compile) == (
        1,
        "cuda",
        "bfloat16",
        True,
    )
    with pytest.raises(ConfigError) as caught:
        make_plan(config, world_size=33, cuda=False)
    assert "global_batch_size=32 leaves some of the 33 processes without a row" in one_line(caught)


def test_micro_batches_shrink_where_a_process_has_few_rows(file):
    config = load_config(file, ["train.micro_batch_size=4", "train.global_batch_size=12"])
    sizes = {
        world: (plan.micro_batch_size, plan.accumulation)
        for world in (1, 2, 4, 6, 12)
        for plan in [make_plan(config, world_size=world, cuda=False)]
    }
    assert sizes == {1: (4, 3), 2: (3, 2), 4: (3, 1), 6: (2, 1), 12: (1, 1)}


def test_plan_takes_what_is_said_over_what_is_found(file):
    words = ["run.device=cpu", "train.dtype=bfloat16", "train.compile=true"]
    plan = make_plan(load_config(file, words), cuda=True)
    assert (plan.device, plan.dtype, plan.compile) == ("cpu", "bfloat16", True)
    with pytest.raises(ConfigError, match="PyTorch sees no CUDA device"):
        make_plan(load_config(file, ["run.device=cuda"]), cuda=False)
