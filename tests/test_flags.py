import json
import pathlib
from typing import Literal

import absl.flags
import pytest
from pydantic import Field

import tfloop


class ModelConfig(tfloop.Config):
    hidden_size: int = Field(512, gt=0, description="Units of the hidden layer.")
    sizes: tuple[int, ...] = (8, 16)


class TrainingConfig(tfloop.Config):
    lr: float = Field(1e-4, ge=0, description="Learning rate.")
    num_epochs: int | None = None
    jit: bool = False
    verbose: bool = True
    kind: Literal["a", "b"] = "a"
    level: Literal[1, 2] = 1
    workdir: str | None = None
    folder: pathlib.Path = pathlib.Path("here")
    model: ModelConfig = ModelConfig(hidden_size=8)


class Required(tfloop.Config):
    name: str
    size: int = 3


def parsed(*arguments, config_class=TrainingConfig):
    flags = absl.flags.FlagValues()
    tfloop.flags.define_config(config_class, flag_values=flags)
    assert flags(["program", *arguments]) == ["program"]
    return tfloop.flags.config(flag_values=flags)


def test_without_flags_the_config_has_its_defaults():
    assert parsed() == TrainingConfig()


def test_flags_of_every_kind_set_their_field():
    config = parsed(
        "--lr=0.5",
        "--num_epochs", "3",
        "--jit",
        "--noverbose",
        "--kind=b",
        "--level=2",
        "--workdir=runs",
        "--folder=there",
        "--model.hidden_size=32",
        "--model.sizes=[1, 2, 3]",
    )  # fmt: skip
    assert config == TrainingConfig(
        lr=0.5,
        num_epochs=3,
        jit=True,
        verbose=False,
        kind="b",
        level=2,
        workdir="runs",
        folder=pathlib.Path("there"),
        model=ModelConfig(hidden_size=32, sizes=(1, 2, 3)),
    )


def test_an_int_is_read_as_a_float_where_one_is_due():
    assert parsed("--lr=1").lr == 1.0


def test_one_nested_flag_keeps_the_parents_other_defaults():
    assert parsed("--model.sizes=[1]").model == ModelConfig(hidden_size=8, sizes=(1,))


def test_the_file_comes_before_the_defaults_and_flags_before_the_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"lr": 0.25, "kind": "b", "model": {"hidden_size": 5}}))
    config = parsed(f"--config={file}", "--lr=0.5", "--model.sizes=[1]")
    expected = TrainingConfig(lr=0.5, kind="b", model=ModelConfig(hidden_size=5, sizes=(1,)))
    assert config == expected


def test_a_flag_given_with_its_default_still_beats_the_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"lr": 0.25, "jit": true}')
    config = parsed(f"--config={file}", "--lr=1e-4", "--nojit")
    assert (config.lr, config.jit) == (1e-4, False)


def test_a_saved_config_is_a_file_for_flags(tmp_path):
    config = TrainingConfig(lr=0.3, folder=pathlib.Path("x"), num_epochs=2)
    config.save(tmp_path / "c.json")
    assert parsed(f"--config={tmp_path / 'c.json'}") == config


def test_a_required_field_may_come_from_flag_or_file(tmp_path):
    (tmp_path / "c.json").write_text('{"name": "file"}')
    assert parsed("--name=flag", config_class=Required).name == "flag"
    assert parsed(f"--config={tmp_path / 'c.json'}", config_class=Required).name == "file"
    with pytest.raises(ValueError, match="`command line` refuses its settings: missing key 'name'"):
        parsed(config_class=Required)


def test_help_shows_descriptions_defaults_and_choices():
    flags = absl.flags.FlagValues()
    tfloop.flags.define_config(TrainingConfig, flag_values=flags)
    text = flags.get_help()
    for expected in ("--lr: Learning rate.", "'0.0001'", "<a|b>", "--[no]jit", "Sets `kind`"):
        assert expected in text
    assert "--model.hidden_size: Units of the hidden layer.\n    (default: '8')" in text


def test_the_flags_belong_to_the_module_that_defines_them():
    flags = absl.flags.FlagValues()
    tfloop.flags.define_config(TrainingConfig, flag_values=flags)
    assert "--lr" in flags.module_help(__name__)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--lr=nan", "`lr` got nan, expected a finite number"),
        ("--lr=-1", "`lr` got -1.0, expected greater than or equal to 0"),
        ("--level=3", "`level` got 3, expected 1 or 2"),
        ("--model.hidden_size=0", "`model.hidden_size` got 0, expected greater than 0"),
        ('--model.sizes=["a"]', "`model.sizes.0` got 'a', expected a valid integer"),
    ],
)
def test_a_value_that_the_field_refuses_raises_with_its_name(argument, expected):
    with pytest.raises(ValueError, match="`command line` refuses its settings") as caught:
        parsed(argument)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--lr=fast", "flag --lr=fast: could not convert"),
        ("--num_epochs=2.5", "flag --num_epochs=2.5"),
        ("--kind=c", "flag --kind=c: value should be one of <a|b>"),
        ("--model.sizes=1,2", "flag --model.sizes=1,2: Extra data"),
        ("--rl=3", "Unknown command line flag 'rl'"),
    ],
)
def test_what_absl_refuses_is_absls_error(argument, expected):
    with pytest.raises(absl.flags.Error, match=expected):
        parsed(argument)


def test_a_wrong_file_raises_and_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="`--config=nowhere.json` found no file"):
        parsed("--config=nowhere.json")
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ValueError, match="c.json` found no JSON"):
        parsed(f"--config={tmp_path / 'c.json'}")
    (tmp_path / "c.json").write_text('{"lrr": 1}')
    with pytest.raises(ValueError, match="--config=.*c.json` refuses .*unknown key 'lrr'. Did you"):
        parsed(f"--config={tmp_path / 'c.json'}")


def test_a_file_that_has_a_number_where_settings_are_due_is_refused(tmp_path):
    (tmp_path / "c.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match="`model` got 3, expected an object"):
        parsed(f"--config={tmp_path / 'c.json'}", "--model.hidden_size=1")


def test_two_programs_do_not_meet():
    assert parsed("--lr=0.5").lr == 0.5
    assert parsed().lr == 1e-4


def test_define_config_refuses_what_is_no_config_class():
    for wrong in (TrainingConfig(), int, "TrainingConfig"):
        with pytest.raises(TypeError, match="takes a class: got .*a subclass of `tfloop.Config`"):
            tfloop.flags.define_config(wrong, flag_values=absl.flags.FlagValues())


def test_define_config_refuses_a_second_config():
    flags = absl.flags.FlagValues()
    tfloop.flags.define_config(Required, flag_values=flags)
    with pytest.raises(
        ValueError, match=r"define_config\(TrainingConfig\)` comes second: got flag"
    ):
        tfloop.flags.define_config(TrainingConfig, flag_values=flags)


def test_define_config_refuses_names_that_are_taken():
    class WithConfig(tfloop.Config):
        config: str = ""

    flags = absl.flags.FlagValues()
    with pytest.raises(ValueError, match="can't define --config: got a flag of that name"):
        tfloop.flags.define_config(WithConfig, flag_values=flags)
    absl.flags.DEFINE_string("size", None, "Taken.", flag_values=flags)
    with pytest.raises(ValueError, match="can't define --size: got a flag of that name"):
        tfloop.flags.define_config(Required, flag_values=flags)
    assert "name" not in flags


def test_config_refuses_to_be_read_too_early():
    flags = absl.flags.FlagValues()
    with pytest.raises(RuntimeError, match="no flags to read: got no config class"):
        tfloop.flags.config(flag_values=flags)
    tfloop.flags.define_config(Required, flag_values=flags)
    with pytest.raises(RuntimeError, match="called too early.*absl.app.run"):
        tfloop.flags.config(flag_values=flags)
