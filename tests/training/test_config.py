"""Configs: what is accepted, and errors that name the key."""

import re

import pytest

from attnorm.training.config import ConfigError, parse_argument
from attnorm.training.loop import parse_config


def changed(config, path, value):
    *sections, key = path.split(".")
    for section in sections:
        config = config[section]
    config[key] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("log_evry", 1, "config: unknown key 'log_evry'; did you mean 'log_every'?"),
        ("optimizer.lr", 1.0, "config.optimizer: unknown key 'lr'; known: name,"),
        ("counting.model.depth", 2, "config.counting.model: unknown key 'depth'"),
        ("task", "countin", "config.task must be one of counting, "),
        ("log_every", 0, "config.log_every must be a whole number > 0, got 0"),
        ("log_every", "often", "config.log_every must be int, got 'often'"),
        ("log_every", True, "config.log_every must be int, got True"),
        ("optimizer", 3, "config.optimizer must be a section of keys, got 3"),
        ("optimizer.learning_rate", -1.0, "config.optimizer.learning_rate must be a number > 0, got -1.0"),
        ("optimizer.name", "sgd", "config.optimizer.name must be one of adamw, muon, got 'sgd'"),
        ("optimizer.schedule", "step", "config.optimizer.schedule must be one of constant, linear,"),
        (
            "optimizer.schedule",
            "cosine",
            "config.optimizer.cooldown_fraction must be 0 with schedule = cosine, got 0.25",
        ),
        ("mesh.fsdp", 0, "config.mesh.fsdp must be a whole number > 0, or -1, got 0"),
        ("mesh.tensor", -1, "config.mesh.tensor must be a whole number > 0 where data is -1, got -1"),
        ("ema_decay", 1.0, "config.ema_decay must be a number in [0, 1), got 1.0"),
        ("accumulation_steps", 0, "config.accumulation_steps must be a whole number > 0, got 0"),
        ("keep_period", -1, "config.keep_period must be a whole number >= 0, got -1"),
        ("optimizer.beta1", 1, "config.optimizer.beta1 must be a number in [0, 1), got 1.0"),
        ("ensemble.seeds", (), "config.ensemble.seeds must be at least one, got ()"),
        ("ensemble.seeds", (0, 0), "config.ensemble.seeds must be without repetition, got (0, 0)"),
        (
            "ensemble.seeds",
            (2**31,),
            "config.ensemble.seeds must be numbers from 0 to 2^31 - 1, got (2147483648",
        ),
        ("ensemble.seeds", (-1,), "config.ensemble.seeds must be numbers from 0 to 2^31 - 1, got (-1,)"),
        (
            "optimizer.learning_rate",
            float("inf"),
            "config.optimizer.learning_rate must be a number > 0, got inf",
        ),
        ("optimizer.clip_norm", float("nan"), "config.optimizer.clip_norm must be a number > 0, got nan"),
        (
            "counting.vocab_size",
            2**31,
            "config.counting.vocab_size must be a whole number > 0, less than 2^31",
        ),
        (
            "counting.steps_per_stage",
            2**30,
            "config.counting.steps_per_stage must be less than 2^31 / num_stages",
        ),
        ("counting.num_stages", 10**9, "config.counting.num_stages must be at most 31"),
        ("ensemble.normalizers", ("lp(p=1e39)",), "config.ensemble.normalizers: 'lp(p=1e39)': p must be"),
        ("ensemble.normalizers", ("sink(b=1e39)",), "config.ensemble.normalizers: 'sink(b=1e39)': b must be"),
        (
            "ensemble.normalizers",
            ("softmax_plus_n(n=-1)",),
            "config.ensemble.normalizers: 'softmax_plus_n(n=-1)': n must be",
        ),
        ("ensemble.seeds", 0, "config.ensemble.seeds must be a tuple, got 0"),
        ("ensemble.seeds", (0, 1.5), "config.ensemble.seeds[1] must be int, got 1.5"),
        ("ensemble.normalizers", ("lp(p=0)",), "config.ensemble.normalizers: 'lp(p=0)': p must be"),
        (
            "ensemble.normalizers",
            ("lp(p=-1)",),
            "config.ensemble.normalizers: 'lp(p=-1)': p must be",
        ),
        (
            "ensemble.normalizers",
            ("lp(p=two)",),
            "config.ensemble.normalizers: 'lp(p=two)': p must be a number",
        ),
        ("ensemble.normalizers", ("l3",), "config.ensemble.normalizers: 'l3': normalizer must be one of"),
        (
            "ensemble.normalizers",
            ("lp(q=2)",),
            "config.ensemble.normalizers: 'lp(q=2)': normalizer 'lp' has parameters",
        ),
        ("ensemble.normalizers", ("lp 2",), "config.ensemble.normalizers: 'lp 2': normalizer must be a name"),
        (
            "counting.tokens_per_batch",
            36,
            "config.counting.tokens_per_batch must be a multiple of the last stage's",
        ),
        ("counting.vocab_size", 1, "config.counting.vocab_size must be a whole number > 1, got 1"),
        (
            "counting.model.norm",
            "group",
            "config.counting.model.norm must be one of layer, batch, got 'group'",
        ),
        ("counting.model.features", 9, "config.counting.model.features must be a multiple of 2 heads, got 9"),
    ],
)
def test_errors_name_the_key(tiny, path, value, message):
    changed(tiny, path, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(tiny)


def test_a_missing_key_is_named(tiny):
    del tiny["optimizer"]["clip_norm"]
    with pytest.raises(ConfigError, match=r"config\.optimizer\.clip_norm is missing"):
        parse_config(tiny)
    del tiny["counting"]
    with pytest.raises(ConfigError, match=r"config\.counting, the section of the task, is missing"):
        parse_config(tiny)


def test_a_whole_number_serves_as_float(tiny):
    changed(tiny, "optimizer.weight_decay", 0)
    config, _ = parse_config(tiny)
    assert config.optimizer.weight_decay == 0.0


def test_arguments_of_a_config_file():
    parsed = parse_argument("a,b=0.5,c=x,d=false", a=False, b=1.0, c="", d=True)
    assert vars(parsed) == {"a": True, "b": 0.5, "c": "x", "d": False}
    assert vars(parse_argument(None, a=False)) == {"a": False}
    parsed = parse_argument("a=general(F=softplus,p=2),b=3,c=lp(p=2)", a="", b=1, c="")
    assert vars(parsed) == {"a": "general(F=softplus,p=2)", "b": 3, "c": "lp(p=2)"}
    for argument in ("b", "a=2", "n=x", "a=maybe"):
        with pytest.raises(ConfigError, match="config argument"):
            parse_argument(argument, a=False, n=1)
