import json
import math
import os
import pathlib
from typing import Any, Literal

import keras
import pytest
from pydantic import Field

import tfloop


class ModelConfig(tfloop.Config):
    hidden_size: int = Field(512, gt=0)
    sizes: tuple[int, ...] = (1, 2)
    dropout: float = 0.5


class TrainingConfig(tfloop.Config):
    num_epochs: int = Field(10, ge=0)
    lr: float = 1e-4
    kind: Literal["a", "b"] = "a"
    note: str | None = None
    shuffle: bool = True
    model: ModelConfig = ModelConfig()
    extra: Any = None


class Required(tfloop.Config):
    name: str
    size: int = 3


class Outer(tfloop.Config):
    model: ModelConfig = ModelConfig(hidden_size=8, sizes=(3,))
    optimizer: tfloop.OptimizerConfig = tfloop.OptimizerConfig("adamw", weight_decay=0.1)
    adam: tfloop.AdamConfig = tfloop.AdamConfig(epsilon=1e-5)


CHANGED = TrainingConfig(num_epochs=3, lr=0.1, note="é", model=ModelConfig(sizes=(4, 5, 6)))


class TestJson:
    @pytest.mark.parametrize("config", [TrainingConfig(), CHANGED, Outer(), Required(name="x")])
    def test_what_is_saved_loads_as_equal(self, config, tmp_path):
        path = tmp_path / "config.json"
        config.save(path)
        assert type(config).load(path) == config
        assert type(config).load(str(path)) == config

    def test_str_is_the_json_of_the_file(self, tmp_path):
        CHANGED.save(tmp_path / "config.json")
        text = (tmp_path / "config.json").read_text(encoding="utf-8")
        assert text == f"{CHANGED}\n"
        assert json.loads(str(CHANGED))["model"] == {
            "hidden_size": 512,
            "sizes": [4, 5, 6],
            "dropout": 0.5,
        }
        assert '\n  "num_epochs": 3,\n' in str(CHANGED)

    def test_every_float_survives_bit_for_bit(self, tmp_path):
        for lr in (0.1, 1e-300, 1 / 3, math.nextafter(1, 2), 5e-324, -0.0):
            TrainingConfig(lr=lr).save(tmp_path / "c.json")
            assert TrainingConfig.load(tmp_path / "c.json").lr.hex() == lr.hex()

    def test_missing_keys_take_their_defaults(self, tmp_path):
        (tmp_path / "c.json").write_text('{"lr": 1, "model": {"hidden_size": 3}}')
        loaded = TrainingConfig.load(tmp_path / "c.json")
        assert loaded == TrainingConfig(lr=1.0, model=ModelConfig(hidden_size=3))
        assert isinstance(loaded.lr, float)

    def test_missing_nested_keys_take_the_parents_default(self, tmp_path):
        (tmp_path / "c.json").write_text('{"model": {"dropout": 0.1}, "adam": {"beta_1": 0.5}}')
        loaded = Outer.load(tmp_path / "c.json")
        assert loaded.model == ModelConfig(hidden_size=8, sizes=(3,), dropout=0.1)
        assert loaded.adam == tfloop.AdamConfig(epsilon=1e-5, beta_1=0.5)

    def test_another_optimizer_does_not_inherit_the_defaults_arguments(self, tmp_path):
        (tmp_path / "c.json").write_text('{"optimizer": {"name": "sgd"}}')
        assert Outer.load(tmp_path / "c.json").optimizer == tfloop.OptimizerConfig("sgd")

    def test_a_value_of_a_subclass_is_written_whole(self):
        class Base(tfloop.Config):
            pass

        class Holder(tfloop.Config):
            part: Base

        class Derived(Base):
            size: int = 3

        assert json.loads(str(Holder(part=Derived()))) == {"part": {"size": 3}}


class TestSave:
    def test_folders_are_made(self, tmp_path):
        CHANGED.save(tmp_path / "a" / "b" / "c.json")
        assert TrainingConfig.load(tmp_path / "a" / "b" / "c.json") == CHANGED

    def test_a_failed_write_leaves_the_old_file_and_no_draft(self, tmp_path, monkeypatch):
        path = tmp_path / "c.json"
        TrainingConfig().save(path)

        def full_disk(*_):
            raise OSError("disk full")

        monkeypatch.setattr(os, "replace", full_disk)
        with pytest.raises(OSError, match="disk full"):
            CHANGED.save(path)
        monkeypatch.undo()
        assert TrainingConfig.load(path) == TrainingConfig()
        assert [p.name for p in tmp_path.iterdir()] == ["c.json"]

    def test_the_file_has_the_usual_permissions(self, tmp_path):
        CHANGED.save(tmp_path / "c.json")
        (tmp_path / "plain").write_text("")
        mode = (tmp_path / "plain").stat().st_mode
        assert (tmp_path / "c.json").stat().st_mode == mode

    def test_a_file_in_the_place_of_a_folder_raises(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file"):
            CHANGED.save(tmp_path / "file" / "c.json")


class TestLoadRefuses:
    @staticmethod
    def load(tmp_path, text):
        path = tmp_path / "config.json"
        path.write_text(text)
        return TrainingConfig.load(path)

    def test_a_missing_file_with_near_misses(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        expected = r"load\('.*confg.json'\)` found no file.*Did you mean 'config.json'\?"
        with pytest.raises(FileNotFoundError, match=expected):
            TrainingConfig.load(tmp_path / "confg.json")
        with pytest.raises(FileNotFoundError, match="found no file"):
            TrainingConfig.load(tmp_path / "no" / "such.json")

    def test_a_folder(self, tmp_path):
        with pytest.raises(ValueError, match="found a folder.*config.json"):
            TrainingConfig.load(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", '{"lr": 1,}', "lr = 1", '{"lr": 1} x'])
    def test_what_is_no_json(self, tmp_path, text):
        with pytest.raises(ValueError, match="found no JSON: got .*expected an object"):
            self.load(tmp_path, text)

    def test_bytes_that_are_no_text(self, tmp_path):
        (tmp_path / "c.json").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match="found no JSON: got 'utf-8' codec"):
            TrainingConfig.load(tmp_path / "c.json")

    def test_json_that_is_no_object(self, tmp_path):
        with pytest.raises(ValueError, match="found no settings: got a JSON list"):
            self.load(tmp_path, "[1]")

    def test_an_unknown_key_with_near_misses(self, tmp_path):
        with pytest.raises(ValueError, match=r"unknown key 'num_epoch'. Did you mean 'num_epochs'"):
            self.load(tmp_path, '{"num_epoch": 3}')
        with pytest.raises(ValueError, match=r"unknown key 'model.hiden_size'. Did you mean 'hidd"):
            self.load(tmp_path, '{"model": {"hiden_size": 3}}')
        with pytest.raises(ValueError, match=r"unknown key 'zzz'. It has 'num_epochs', 'lr'"):
            self.load(tmp_path, '{"zzz": 3}')

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ('{"num_epochs": "3"}', "`num_epochs` got '3', expected a valid integer. The default"),
            ('{"num_epochs": true}', "`num_epochs` got True, expected a valid integer"),
            ('{"num_epochs": 2.5}', "`num_epochs` got 2.5, expected a valid integer"),
            ('{"num_epochs": -1}', "`num_epochs` got -1, expected greater than or equal to 0"),
            ('{"lr": "fast"}', "`lr` got 'fast', expected a valid number. The default is 0.0001"),
            ('{"lr": NaN}', "`lr` got nan, expected a finite number"),
            ('{"lr": Infinity}', "`lr` got inf, expected a finite number"),
            ('{"lr": null}', "`lr` got None, expected a valid number"),
            ('{"kind": "c"}', "`kind` got 'c', expected 'a' or 'b'"),
            ('{"note": 3}', "`note` got 3, expected a valid string"),
            ('{"shuffle": 1}', "`shuffle` got 1, expected a valid boolean"),
            ('{"model": 3}', "`model` got 3, expected an object"),
            ('{"model": {"sizes": [1, "2"]}}', "`model.sizes.1` got '2', expected a valid integer"),
            ('{"extra": [1, {"x": NaN}]}', "expected finite numbers, since JSON has no NaN"),
        ],
    )
    def test_a_wrong_value_by_its_name(self, tmp_path, text, expected):
        with pytest.raises(ValueError, match=r"config.json'\)` refuses its settings: ") as caught:
            self.load(tmp_path, text)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_missing_key_that_has_no_default(self, tmp_path):
        (tmp_path / "c.json").write_text("{}")
        with pytest.raises(ValueError, match="missing key 'name', which has no default"):
            Required.load(tmp_path / "c.json")

    def test_many_wrong_values_in_one_message(self, tmp_path):
        text = json.dumps({f"key_{i}": i for i in range(7)})
        with pytest.raises(ValueError, match="unknown key 'key_4'.* And 2 more.") as caught:
            self.load(tmp_path, text)
        assert "key_5" not in str(caught.value)


class TestValues:
    def test_a_config_is_frozen_and_compares_by_value(self):
        with pytest.raises(ValueError, match="frozen"):
            CHANGED.lr = 3.0
        assert TrainingConfig() == TrainingConfig()
        assert len({TrainingConfig(), TrainingConfig(), CHANGED}) == 2

    def test_an_int_is_a_float_and_nothing_else_is_converted(self):
        assert TrainingConfig(lr=1).lr == 1.0
        for wrong in ({"num_epochs": "3"}, {"num_epochs": 3.0}, {"num_epochs": True}):
            with pytest.raises(ValueError, match=r"`TrainingConfig\(...\)` refuses"):
                TrainingConfig(**wrong)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_numbers_that_are_not_finite_are_refused_wherever_they_hide(self, value):
        for wrong in ({"lr": value}, {"extra": value}, {"extra": {"a": (1, [value])}}):
            with pytest.raises(ValueError, match="finite number"):
                TrainingConfig(**wrong)
        with pytest.raises(ValueError, match="finite number"):
            tfloop.OptimizerConfig("adam", beta_1=value)

    def test_replace_changes_a_copy(self):
        changed = CHANGED.replace(lr=0.5, model=ModelConfig(hidden_size=1))
        assert (changed.lr, changed.model.hidden_size, changed.num_epochs) == (0.5, 1, 3)
        assert CHANGED.lr == 0.1
        assert CHANGED.replace() == CHANGED

    def test_replace_checks(self):
        with pytest.raises(ValueError, match="unknown key 'lrr'. Did you mean 'lr'"):
            CHANGED.replace(lrr=3)
        with pytest.raises(ValueError, match="`num_epochs` got -3, expected greater"):
            CHANGED.replace(num_epochs=-3)

    def test_replace_keeps_an_optimizers_arguments(self):
        config = tfloop.OptimizerConfig("adamw", weight_decay=0.1).replace(beta_1=0.8)
        assert config == tfloop.OptimizerConfig("adamw", weight_decay=0.1, beta_1=0.8)

    def test_paths_and_other_json_types_load(self, tmp_path):
        class WithPath(tfloop.Config):
            folder: pathlib.Path = pathlib.Path("here")

        WithPath(folder=tmp_path).save(tmp_path / "c.json")
        assert WithPath.load(tmp_path / "c.json").folder == tmp_path


class TestOptimizers:
    def test_a_name_and_arguments_make_the_keras_optimizer(self):
        optim = tfloop.OptimizerConfig("AdamW", weight_decay=0.01, beta_1=0.8).init()
        assert isinstance(optim, tfloop.ModuleOptimizer)

    def test_the_optimizer_steps_as_keras_does(self):
        mine = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        theirs = keras.models.clone_model(mine)
        theirs.set_weights(mine.get_weights())
        optim = tfloop.OptimizerConfig("adamw", weight_decay=0.3, learning_rate=1).init()
        grads = [keras.ops.ones(v.shape) for v in mine.trainable_variables]
        paths = list(tfloop.named_parameters(mine))
        optim.step(None, mine, tfloop.GradientsParams(dict(zip(paths, grads, strict=True))))
        keras.optimizers.AdamW(1.0, weight_decay=0.3).apply(grads, theirs.trainable_variables)
        for a, b in zip(mine.get_weights(), theirs.get_weights(), strict=True):
            assert a == pytest.approx(b, rel=1e-6)

    def test_adam_has_the_defaults_of_keras(self):
        keras_adam = keras.optimizers.Adam().get_config()
        for name, value in tfloop.AdamConfig():
            if name != "learning_rate":
                assert value == pytest.approx(keras_adam[name]), name
        assert isinstance(tfloop.AdamConfig(learning_rate=0.1).init(), tfloop.ModuleOptimizer)

    @pytest.mark.parametrize(
        "wrong", [{"beta_1": 1.0}, {"beta_2": -0.1}, {"epsilon": 0.0}, {"weight_decay": -1.0}]
    )
    def test_adams_ranges_are_checked(self, wrong):
        with pytest.raises(ValueError, match=rf"`AdamConfig\(...\)` .*`{next(iter(wrong))}` got"):
            tfloop.AdamConfig(**wrong)

    def test_an_unknown_optimizer_raises_with_near_misses(self):
        with pytest.raises(ValueError, match="a Keras optimizer, not 'adamm'. Did you mean 'adam"):
            tfloop.OptimizerConfig("adamm")
        with pytest.raises(ValueError, match="not 'zzzzz'. Keras has 'adadelta'"):
            tfloop.OptimizerConfig("zzzzz")
        with pytest.raises(ValueError, match="`name` got None, expected a valid string"):
            tfloop.OptimizerConfig()

    def test_an_unknown_argument_raises_with_near_misses(self):
        with pytest.raises(ValueError, match="not 'weight_decy'. Did you mean 'weight_decay'"):
            tfloop.OptimizerConfig("adamw", weight_decy=0.1)
        with pytest.raises(ValueError, match="not 'zzzzz'. It has 'amsgrad'"):
            tfloop.OptimizerConfig("adamw", zzzzz=0.1)

    def test_a_schedule_is_given_as_keras_serialises_it(self):
        schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
        serialised = keras.optimizers.schedules.serialize(schedule)
        config = tfloop.OptimizerConfig("sgd", learning_rate=serialised)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        before = float(model.get_weights()[0][0, 0])
        grads = tfloop.GradientsParams({"dense.kernel": keras.ops.ones((1, 1))})
        config.init().step(None, model, grads)
        assert float(model.get_weights()[0][0, 0]) == pytest.approx(before - 0.5)
