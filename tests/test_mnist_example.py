"""The example as its users meet it: its numbers, its files, its command line."""

import contextlib
import http.server
import itertools
import json
import os
import pathlib
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
import threading

import absl.flags
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import flagsaver
from native import again_after_native_abort, check_not_aborted
from processes import SILENCE, Child

import tfloop
from tfloop.examples import _command, _images, _plots, mnist
from tfloop.examples._report import Report

MNIST_DIR = os.environ.get("TFLOOP_TEST_DATA_DIR")
LINE = r"\[(Train|Valid) - Epoch (\d+) - Iteration (\d+)\] Loss \d+\.\d{3} \| Accuracy \d+\.\d{3} %"


@pytest.fixture(scope="module")
def digits():
    return _images.load("digits", None)


@pytest.fixture(scope="module")
def few(digits):
    """Eight batches of 16 to train on and two to test: of one shape, which is traced once."""
    sizes = zip(digits, (128, 32), strict=True)
    return [_images.Images(*(array[:size] for array in split)) for split, size in sizes]


@pytest.fixture
def few_digits(few, monkeypatch):
    """The command line finds these, without the seconds that TFDS takes to prepare all."""
    monkeypatch.setattr(_images, "load", lambda dataset, folder: few)


@pytest.fixture(scope="module")
def digits_run(digits, tmp_path_factory):
    """Ten epochs on the digits, for whoever looks at one: the settings and the report."""
    folder = tmp_path_factory.mktemp("digits")
    config = mnist.TrainingConfig(lr=1e-3, workdir=str(folder), log_every=100)
    return config, mnist.train(config, *digits)


@pytest.fixture(scope="module")
def mnist_run():
    """One epoch on MNIST: the splits, the settings and the report."""
    if MNIST_DIR is None:
        pytest.skip("TFLOOP_TEST_DATA_DIR names no folder with MNIST prepared for TFDS")
    config = mnist.TrainingConfig(num_epochs=1, lr=1e-3, log_every=300)
    splits = _images.load("mnist", MNIST_DIR)
    return splits, config, mnist.train(config, *splits)


@pytest.fixture
def command(capsys):
    """Runs the example's command line in this process: exit code, stdout, stderr."""

    def run(*arguments):
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
            _command.run(mnist.main, ["mnist", *arguments])
        absl.flags.FLAGS.unparse_flags()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.fixture
def heeded_sigint():
    """Python's own reaction to Ctrl-C, which a shell's background job is started without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def by_hand(config, images, labels, iterations):
    """The losses and gradient norms of a loop without tfloop: a GradientTape and Keras' Adam."""
    keras.utils.set_random_seed(config.seed)
    model = config.model.init()
    adam = keras.optimizers.Adam(config.lr)

    @tf.function(reduce_retracing=True)
    def step(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            )
        grads = tape.gradient(loss, model.trainable_weights)
        adam.apply(grads, model.trainable_weights)
        return loss, tf.linalg.global_norm(grads)

    def batches():
        for epoch in itertools.count():
            generator = np.random.Generator(np.random.PCG64([config.seed, epoch]))
            order = generator.permutation(len(images))
            for start in range(0, len(order), config.batch_size):
                yield order[start : start + config.batch_size]

    seen = []
    for rows in itertools.islice(batches(), iterations):
        batch = (images[rows].astype(np.float32) / 255 - 0.1307) / 0.3081
        seen.append([float(x) for x in step(tf.constant(batch), tf.constant(labels[rows]))])
    return tuple(zip(*seen, strict=True))


class TestModel:
    def test_it_has_burns_parameters(self):
        model = mnist.ModelConfig().init()
        assert model.count_params() == 1_061_098
        assert {path: tuple(v.shape) for path, v in tfloop.named_parameters(model).items()} == {
            "conv1.kernel": (3, 3, 1, 8),
            "conv1.bias": (8,),
            "conv2.kernel": (3, 3, 8, 16),
            "conv2.bias": (16,),
            "linear1.kernel": (1024, 1024),
            "linear1.bias": (1024,),
            "linear2.kernel": (1024, 10),
            "linear2.bias": (10,),
        }
        assert model.output_shape == (None, 10)

    def test_its_pool_is_the_adaptive_average_pool(self):
        layers = mnist.ModelConfig().init().layers
        (pool,) = (layer for layer in layers if isinstance(layer, keras.layers.AveragePooling2D))
        images = np.random.default_rng(0).normal(size=(2, 24, 24, 16)).astype(np.float32)
        adaptive = keras.layers.AdaptiveAveragePooling2D(8)
        np.testing.assert_allclose(pool(images), adaptive(images), rtol=1e-5, atol=1e-6)

    def test_the_batcher_normalises_as_burn_does(self):
        raw = _images.Images(np.array([[[0, 255]]], np.uint8), np.array([3]))
        batch = mnist.batcher(raw)
        expected = [[[-0.1307 / 0.3081, (1 - 0.1307) / 0.3081]]]
        np.testing.assert_allclose(batch.images, expected, rtol=1e-6)
        assert batch.targets is raw.labels

    def test_the_settings_of_the_model_are_used(self):
        model = mnist.ModelConfig(num_classes=3, hidden_size=7, dropout=0.25).init()
        assert model.output_shape == (None, 3)
        rates = [layer.rate for layer in model.layers if isinstance(layer, keras.layers.Dropout)]
        assert rates == [0.25] * 3


class TestData:
    def test_the_digits_are_scikit_learns_enlarged(self, digits):
        train, test = digits
        assert (train.images.shape, test.images.shape) == ((1438, 28, 28), (359, 28, 28))
        assert (train.images.dtype, train.labels.dtype) == (np.uint8, np.int64)
        labels = np.concatenate([train.labels, test.labels])
        assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
        assert train.images.max() > 240
        # The mean over all pixels is that of the originals, 4.884 of 16, in units of 255.
        everything = np.concatenate([train.images, test.images])
        assert everything.mean() == pytest.approx(4.884 * 255 / 16, rel=0.02)

    def test_auto_takes_the_digits_in_seconds_where_mnist_cannot_be_had(
        self, monkeypatch, capsys, tmp_path
    ):
        with socket.create_server(("127.0.0.1", 0)) as silent:  # Accepts, and never answers.
            address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
            monkeypatch.setattr(_images, "_MNIST_FILE", address)
            monkeypatch.setattr(_images, "_PATIENCE", 0.1)  # else it would wait for ever
            train, _ = _images.load("auto", str(tmp_path))
        assert len(train.labels) == 1438
        first, second = capsys.readouterr().out.splitlines()
        assert first == (
            f"MNIST isn't prepared under {tmp_path} and its host doesn't answer: "
            "taking the bundled digits."
        )
        assert second.startswith("Data: scikit-learn's 1,797 UCI digits")
        assert list(tmp_path.iterdir()) == []

    def test_a_host_that_answers_is_noticed(self, monkeypatch):
        class Quiet(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            monkeypatch.setattr(_images, "_MNIST_FILE", f"http://127.0.0.1:{server.server_port}/")
            monkeypatch.setattr(_images, "_PATIENCE", SILENCE)
            assert _images._host_answers()
            server.shutdown()

    def test_a_host_that_is_not_there_is_noticed(self, monkeypatch):
        with socket.socket() as deaf:  # Bound, so that nobody else listens there.
            deaf.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
            monkeypatch.setattr(_images, "_MNIST_FILE", address)
            assert not _images._host_answers()

    @pytest.mark.thorough
    def test_auto_takes_mnist_where_it_is_prepared(self, mnist_run, capsys):
        (train, test), _, _ = mnist_run
        assert (train.images.shape, test.images.shape) == ((60000, 28, 28), (10000, 28, 28))
        _, auto_test = _images.load("auto", MNIST_DIR)
        np.testing.assert_array_equal(auto_test.images, test.images)
        assert capsys.readouterr().out.startswith("Data: MNIST, from ")


class TestNumbers:
    def test_losses_and_gradients_on_the_digits_are_those_of_a_loop_by_hand(
        self, digits, digits_run
    ):
        config, report = digits_run
        losses, norms = by_hand(config, *digits[0], 50)
        mine = [iteration.loss for iteration in report.history["Train"][:50]]
        assert mine == pytest.approx(losses, rel=1e-5)
        found = scalars(pathlib.Path(config.workdir) / "train")["gradient_norm/all"]
        assert [step for step, _ in found] == list(range(1, 231))
        assert [norm for _, norm in found[:50]] == pytest.approx(norms, rel=1e-4)

    def test_the_losses_on_mnist_are_those_of_a_loop_by_hand(self, mnist_run):
        (train, _), config, report = mnist_run
        mine = [iteration.loss for iteration in report.history["Train"][:50]]
        assert mine == pytest.approx(by_hand(config, *train, 50)[0], rel=1e-5)

    def test_the_confusion_matrix_is_that_of_the_last_epoch(self, digits, digits_run):
        _, report = digits_run
        epoch, counts = report.confusion
        assert epoch == 10
        assert counts.sum(axis=1).tolist() == np.bincount(digits[1].labels).tolist()
        correct = 100 * np.trace(counts) / 359
        assert correct == pytest.approx(report.averages["Valid"][-1].accuracy, rel=1e-5)
        assert correct != pytest.approx(report.averages["Valid"][0].accuracy, rel=1e-5)

    def test_one_epoch_of_mnist_gives_97_percent(self, mnist_run):
        _, _, report = mnist_run
        assert report.averages["Valid"][0].accuracy > 97
        assert report.averages["Valid"][0].samples == 10000

    @pytest.mark.thorough
    def test_ten_epochs_of_digits_reach_96_percent_and_at_the_rate_of_burn_90(
        self, digits, digits_run
    ):
        assert digits_run[1].averages["Valid"][-1].accuracy > 96
        report = mnist.train(mnist.TrainingConfig(log_every=100), *digits)
        assert report.averages["Valid"][-1].accuracy > 90

    def test_a_run_is_repeatable(self, digits):
        config = mnist.TrainingConfig(num_epochs=1, log_every=100, model={"hidden_size": 32})
        small = [_images.Images(*(array[:200] for array in split)) for split in digits]
        first, second = (mnist.train(config, *small).history for _ in range(2))
        assert first == second

    # 23 batches, the last of them short, and 5, none of them short; 1 batch for less than a call.
    @pytest.mark.parametrize(("samples", "steps"), [(182, 10), (40, 5), (8, 4)])
    def test_several_steps_a_call_give_the_same_run(self, digits, capsys, samples, steps):
        config = mnist.TrainingConfig(
            num_epochs=2, batch_size=8, log_every=3, model={"hidden_size": 32}
        )
        small = [_images.Images(*(array[:samples] for array in split)) for split in digits]
        reports, lines = [], []
        for count in (1, steps):
            reports.append(mnist.train(config.replace(steps_per_execution=count), *small))
            out = capsys.readouterr().out
            lines.append([line.rpartition(" | ")[0] for line in out.splitlines()])
        one, several = reports
        assert lines[0] == lines[1]
        for split in ("Train", "Valid"):
            for mine, theirs in ((one.history, several.history), (one.averages, several.averages)):
                np.testing.assert_allclose(mine[split], theirs[split], rtol=1e-6)

    def test_jit_gives_the_same_losses(self, digits):
        config = mnist.TrainingConfig(
            num_epochs=1, batch_size=16, model=mnist.ModelConfig(hidden_size=8, dropout=0.0)
        )
        small = [_images.Images(*(array[:48] for array in split)) for split in digits]
        plain, jitted = (
            [i.loss for i in mnist.train(config.replace(jit_compile=jit), *small).history["Train"]]
            for jit in (False, True)
        )
        assert plain == pytest.approx(jitted, rel=1e-4)


class TestReport:
    def report(self, tmp_path=None, log_every=2):
        workdir = None if tmp_path is None else str(tmp_path)
        lengths = {"Train": 3, "Valid": 1}
        return Report(mnist.TrainingConfig(), lengths, workdir=workdir, log_every=log_every)

    def test_averages_are_weighted_by_samples(self, capsys):
        with self.report() as report:
            report.iteration("Train", 1, 0, 1.0, 50.0, 3)
            report.iteration("Train", 1, 1, 5.0, 100.0, 1)
            report.iteration("Valid", 1, 0, 2.0, 10.0, 4)
            report.epoch(1)
        assert report.averages["Train"] == [(2.0, 62.5, 4)]
        *_, line, result = capsys.readouterr().out.splitlines()
        assert line.startswith(
            "[Epoch 1] Train loss 2.000, accuracy 62.50 % | Valid loss 2.000, accuracy 10.00 %"
        )
        assert result.startswith("Valid accuracy 10.00 % after epoch 1. ")

    def test_the_first_and_every_nth_iteration_have_a_line(self, capsys):
        with self.report() as report:
            for iteration in range(5):
                report.iteration("Train", 3, iteration, 0.5, 12.5, 1)
        assert capsys.readouterr().out.splitlines() == [
            f"[Train - Epoch 3 - Iteration {iteration}] Loss 0.500 | Accuracy 12.500 %"
            for iteration in (0, 2, 4)
        ]

    def test_ctrl_c_waits_for_the_end_of_the_iteration_once(self, heeded_sigint):
        def interrupted():
            with self.report() as report:
                signal.raise_signal(signal.SIGINT)
                waited.append(True)
                report.iteration("Train", 1, 0, 1.0, 50.0, 3)

        def interrupted_twice():
            with self.report():
                signal.raise_signal(signal.SIGINT)
                waited.append(True)
                signal.raise_signal(signal.SIGINT)

        waited = []
        for run in (interrupted, interrupted_twice):
            with pytest.raises(KeyboardInterrupt):
                run()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert waited == [True, True]

    def test_an_interrupted_epoch_is_written(self, tmp_path, capsys):
        def interrupted():
            with self.report(tmp_path) as report:
                report.iteration("Train", 1, 0, 1.0, 50.0, 3)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert capsys.readouterr().out.splitlines()[1:] == [
            "Interrupted after 1 iterations.",
            f"Wrote config.json, scalars and curves.png to {tmp_path}.",
        ]
        assert scalars(tmp_path / "train") == {"loss": [(1, 1.0)], "accuracy": [(1, 50.0)]}

    def test_several_iterations_are_noted_as_if_one_by_one(self, capsys, tmp_path):
        losses, accuracies = tf.constant([0.5, 0.25, 0.75]), tf.constant([10.0, 20.0, 30.0])
        with self.report(tmp_path) as report:
            several = {"rate": tf.constant([1.0, 2.0, 3.0]), "fixed": 7.0}
            report.iteration("Train", 2, 0, losses, accuracies, tf.constant([4, 4, 2]), several)
            report.epoch(2)
        assert capsys.readouterr().out.splitlines()[:2] == [
            "[Train - Epoch 2 - Iteration 0] Loss 0.500 | Accuracy 10.000 %",
            "[Train - Epoch 2 - Iteration 2] Loss 0.750 | Accuracy 30.000 %",
        ]
        assert report.history["Train"] == [(0.5, 10.0, 4), (0.25, 20.0, 4), (0.75, 30.0, 2)]
        found = scalars(tmp_path / "train")
        assert found["rate"] == [(4, 1.0), (5, 2.0), (6, 3.0)]
        assert found["fixed"] == [(4, 7.0), (5, 7.0), (6, 7.0)]
        assert found["accuracy"] == [(6, 18.0)]

    def test_an_ignored_ctrl_c_stays_ignored(self, heeded_sigint):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with self.report() as report:
            signal.raise_signal(signal.SIGINT)
            report.iteration("Train", 1, 0, 1.0, 50.0, 3)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    def test_its_state_is_the_epochs_behind_it(self, tmp_path, capsys):
        def epoch(report, number):
            report.iteration("Train", number, 0, [3.0, 1.0, 2.0], [1.0, 2.0, 3.0], [4, 4, 4])
            report.confuse(np.array([[[number, 0], [0, 3]]]))
            report.epoch(number)

        whole, first, second = (self.report() for _ in range(3))
        for number in (1, 2):
            epoch(whole, number)
        epoch(first, 1)
        second.deserialize(first.serialize())
        epoch(second, 2)
        assert second.serialize() == whole.serialize()
        assert second.history == whole.history
        assert second.confusion[1].tolist() == [[2, 0], [0, 3]]

    def test_it_refuses_the_epochs_of_other_data(self):
        other = Report(mnist.TrainingConfig(), {"Train": 4, "Valid": 1}, workdir=None, log_every=1)
        with pytest.raises(ValueError, match=r"got data of {'Train': 3.*} batches, expected .*4"):
            self.report().deserialize(other.serialize())

    def test_an_epoch_without_end_has_no_confusion_matrix(self):
        with self.report() as report:
            report.confuse(np.array([[[2, 1], [0, 3]]]))
            report.confuse(np.array([[[1, 0], [0, 0]], [[0, 0], [4, 0]]]))
            report.epoch(7)
            report.confuse(np.array([[[9, 9], [9, 9]]]))
        epoch, counts = report.confusion
        assert (epoch, counts.tolist()) == (7, [[3, 1], [4, 3]])


class TestPlots:
    def test_the_curves_have_every_iteration_and_the_epochs_at_their_ends(self):
        averages = {"Train": [(2.0, 50.0, 3), (0.5, 75.0, 3)], "Valid": [(1.0, 60.0, 1)]}
        figure = _plots.curves([3.0, 1.0, 0.6, 0.4], averages, per_epoch=2, first_epoch=3)
        loss, accuracy = (
            {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
            for axes in figure.axes
        )
        assert loss == {
            "Train, iteration": [[5, 3.0], [6, 1.0], [7, 0.6], [8, 0.4]],
            "Train, epoch": [[6, 2.0], [8, 0.5]],
            "Valid, epoch": [[6, 1.0]],
        }
        assert accuracy == {"Train": [[3, 50.0], [4, 75.0]], "Valid": [[3, 60.0]]}

    def test_the_ticks_of_epochs_are_whole(self):
        for epochs in (1, 3, 40):
            averages = {"Train": [(1.0, 50.0, 1)] * epochs}
            figure = _plots.curves([1.0] * epochs, averages, per_epoch=1, first_epoch=1)
            figure.canvas.draw()
            ticks = figure.axes[1].get_xticks()
            assert all(tick == int(tick) for tick in ticks)
            assert any(1 <= tick <= epochs for tick in ticks)

    def test_the_confusion_matrix_has_its_counts_and_the_classes_that_occur(self):
        counts = np.zeros((50, 50), int)
        counts[3, 3], counts[3, 20], counts[7, 7] = 1200, 2, 30
        (axes,) = _plots.confusion(counts, epoch=4).axes
        assert axes.get_title() == "Validation after epoch 4: 1,230 of 1,232 right"
        assert {text.get_position(): text.get_text() for text in axes.texts} == {
            (0, 0): "1200",
            (2, 0): "2",
            (1, 1): "30",
        }
        for axis in (axes.xaxis, axes.yaxis):
            assert [label.get_text() for label in axis.get_ticklabels()] == ["3", "7", "20"]
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("Predicted class", "True class")


def scalars(folder):
    """What TensorBoard would read: tag -> [(step, value)]."""
    found = {}
    for record in tf.data.TFRecordDataset(sorted(str(file) for file in folder.iterdir())):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "scalars"
            number = float(tf.make_ndarray(value.tensor))
            found.setdefault(value.tag, []).append((event.step, number))
    return found


@pytest.mark.usefixtures("few_digits")
class TestFiles:
    def test_the_work_folder_holds_settings_scalars_and_a_plot(self, command, tmp_path):
        folder = tmp_path / "new" / "run"
        arguments = ["--dataset=digits", "--num_epochs=2", "--lr=1e-3", "--model.hidden_size=32"]
        code, out, err = command(*arguments, "--batch_size=16", f"--workdir={folder}")
        assert (code, err) == (0, "")
        config = mnist.TrainingConfig.load(folder / "config.json")
        assert (config.lr, config.num_epochs, config.model.hidden_size) == (1e-3, 2, 32)
        for picture in ("curves.png", "confusion.png"):
            assert (folder / picture).read_bytes().startswith(b"\x89PNG")
        valid = scalars(folder / "valid")
        assert [step for step, _ in valid["loss"]] == [8, 16]
        shown = re.findall(r"Valid loss (\S+), accuracy (\S+) %", out)
        assert [f"{value:.3f}" for _, value in valid["loss"]] == [loss for loss, _ in shown]
        assert [f"{v:.2f}" for _, v in valid["accuracy"]] == [accuracy for _, accuracy in shown]
        assert out.splitlines()[-1] == (
            f"Wrote config.json, scalars, curves.png and confusion.png to {folder}."
        )
        rates = scalars(folder / "train")["learning_rate"]
        assert rates == [(step, pytest.approx(1e-3)) for step in range(1, 17)]

        # The saved settings are a run of their own, and a flag still goes first.
        again = command(f"--config={folder / 'config.json'}", f"--workdir={tmp_path / 'again'}")
        assert [line for line in again[1].splitlines() if "Iteration" in line] == [
            line for line in out.splitlines() if "Iteration" in line
        ]

    @pytest.mark.thorough
    def test_a_resumed_run_goes_on_with_its_curves(self, command, tmp_path):
        arguments = ["--batch_size=16", "--model.hidden_size=8", f"--workdir={tmp_path}"]
        assert command(*arguments, "--num_epochs=1")[0] == 0
        # 8 steps in one call, so that none is left when the epoch is over.
        arguments.append("--steps_per_execution=8")
        assert command(*arguments, "--num_epochs=2", "--resume")[0] == 0
        assert command(*arguments, "--num_epochs=3", "--resume")[0] == 0
        assert [step for step, _ in scalars(tmp_path / "valid")["loss"]] == [8, 16, 24]
        steps = [step for step, _ in scalars(tmp_path / "train")["gradient_norm/all"]]
        assert steps == list(range(1, 25))

    @pytest.fixture
    def drawn(self, monkeypatch):
        """The curves that are drawn."""
        found, draw = [], _plots.curves

        def noted(*args, **options):
            found.append((args, options))
            return draw(*args, **options)

        monkeypatch.setattr(_plots, "curves", noted)
        return found

    @pytest.mark.thorough
    def test_a_resumed_run_has_the_curves_of_the_whole_one(self, command, tmp_path, drawn):
        arguments = ["--batch_size=16", "--model.hidden_size=8", "--lr=1e-3"]
        assert command(*arguments, "--num_epochs=3", f"--workdir={tmp_path / 'whole'}")[0] == 0
        parts = [*arguments, f"--workdir={tmp_path / 'parts'}"]
        assert command(*parts, "--num_epochs=1")[0] == 0
        assert command(*parts, "--num_epochs=3", "--resume")[0] == 0
        whole, _, resumed = drawn
        assert resumed == whole
        assert len(whole[0][0]) == 24

        # Nothing is left to do, and nothing is lost.
        files = ("curves.png", "confusion.png")
        before = [(tmp_path / "parts" / name).read_bytes() for name in files]
        code, out, _ = command(*parts, "--num_epochs=3", "--resume")
        assert code == 0
        assert "Ended after 24 iterations." in out
        assert drawn[-1] == whole
        assert [(tmp_path / "parts" / name).read_bytes() for name in files] == before
        for split in ("train", "valid"):
            found = scalars(tmp_path / "parts" / split)
            assert found == scalars(tmp_path / "whole" / split)

    @pytest.mark.thorough
    def test_a_run_interrupted_in_an_epoch_writes_it_once(self, few, tmp_path, drawn, monkeypatch):
        def interrupted(report, split, epoch, iteration, *noted):
            step(report, split, epoch, iteration, *noted)
            if (split, epoch, iteration) == ("Train", 2, 3):
                raise KeyboardInterrupt

        config = mnist.TrainingConfig(
            num_epochs=2,
            batch_size=16,
            workdir=str(tmp_path / "parts"),
            model=mnist.ModelConfig(hidden_size=8),
        )
        mnist.train(config.replace(workdir=str(tmp_path / "whole")), *few)
        step = Report.iteration
        with monkeypatch.context() as patch:
            patch.setattr(Report, "iteration", interrupted)
            with pytest.raises(KeyboardInterrupt):
                mnist.train(config, *few)
        assert [n for n, _ in scalars(tmp_path / "parts" / "train")["loss"]] == [8, 12]
        mnist.train(config.replace(resume=True), *few)
        assert drawn[-1] == drawn[0]
        for split in ("train", "valid"):
            found = scalars(tmp_path / "parts" / split)
            assert found == scalars(tmp_path / "whole" / split)

    def test_an_event_that_was_not_written_whole_does_no_harm(self, few, tmp_path):
        config = mnist.TrainingConfig(
            num_epochs=1,
            batch_size=16,
            workdir=str(tmp_path),
            model=mnist.ModelConfig(hidden_size=8),
        )
        mnist.train(config, *few)
        (file,) = (tmp_path / "train").iterdir()
        file.write_bytes(file.read_bytes() + b"half a record, cut")
        mnist.train(config.replace(resume=True, num_epochs=2), *few)
        assert [step for step, _ in scalars(tmp_path / "train")["loss"]] == [8, 16]

    def test_a_folder_in_use_is_refused_with_both_ways_on(self, command, tmp_path):
        arguments = ["--batch_size=16", "--model.hidden_size=8", "--num_epochs=1"]
        used = f"--workdir={tmp_path}"
        assert command(*arguments, used)[0] == 0
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        refused = [
            ([*arguments, used], "holds a run already. Go on with it by --resume, or name another"),
            (
                [*arguments, used, "--resume", "--lr=0.5", "--optimizer.beta_1=0.5"],
                "got lr=0.5, optimizer.beta_1=0.5, expected lr=0.0001, optimizer.beta_1=0.9",
            ),
            ([*arguments, used, "--resume", "--batch_size=32"], "got batch_size=32, expected b"),
        ]
        for line, expected in refused:
            code, out, err = command(*line)
            assert (code, err.count("\n")) == (2, 1)
            assert expected in err
            assert "Iteration" not in out
        after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert after == before

        # The line names the settings' file, and with that it goes on.
        config = f"--config={tmp_path / 'config.json'}"
        assert command(config, used, "--resume", "--num_epochs=2")[0] == 0
        assert [step for step, _ in scalars(tmp_path / "train")["loss"]] == [8, 16]

    def test_a_folder_with_settings_alone_is_free_and_one_without_a_run_may_be_resumed(
        self, command, tmp_path
    ):
        mnist.TrainingConfig(num_epochs=0, dataset="digits").save(tmp_path / "config.json")
        config = f"--config={tmp_path / 'config.json'}"
        assert command(config, f"--workdir={tmp_path}")[0] == 0
        assert command(config, f"--workdir={tmp_path / 'new'}", "--resume")[0] == 0

    def test_without_a_work_folder_nothing_is_written(self, command, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert command("--batch_size=16", "--num_epochs=1", "--model.hidden_size=8")[0] == 0
        assert list(tmp_path.iterdir()) == []


class TestEdges:
    @pytest.mark.usefixtures("few_digits")
    def test_no_epochs_end_at_once(self, command):
        code, out, err = command("--dataset=digits", "--num_epochs=0")
        assert (code, err) == (0, "")
        assert out.splitlines()[-1] == "Ended after 0 iterations."

    def test_a_run_ends_with_its_accuracy_and_what_could_be_kept(self, command, tmp_path):
        arguments = ["--dataset=digits", "--num_epochs=1", "--model.hidden_size=8"]
        out = command(*arguments)[1]
        accuracy = re.search(r"Valid loss .*, accuracy (.*) %", out).group(1)
        end = f"Valid accuracy {accuracy} % after epoch 1."
        hint = "Nothing was kept; --workdir=FOLDER keeps all of a run."
        assert out.splitlines()[-1] == f"{end} {hint}"
        assert end in command(*arguments, f"--workdir={tmp_path}")[1].splitlines()

    def test_xla_for_convolutions_on_a_cpu_is_warned_of_in_a_line(self, command):
        code, _, err = command("--dataset=digits", "--num_epochs=0", "--jit_compile")
        assert (code, err.count("\n")) == (0, 1)
        assert err.startswith("warning: --jit_compile makes convolutions on a CPU")

    @pytest.mark.parametrize("asked", [False, True])
    def test_tensorflow_is_silent_unless_it_is_asked(self, asked):
        arguments = ["-m", "tfloop.examples.mnist", "--dataset=digits", "--num_epochs=0"]
        flags = ["--tf_log"] if asked else []
        unset = {"TF_CPP_MIN_LOG_LEVEL": ""}
        with Child(*arguments, *flags, environment=unset) as child:
            ended = child.result()
        assert ended.returncode == 0, ended.stderr
        assert bool(ended.stderr) == asked

    def test_a_batch_larger_than_the_data_is_the_data(self, digits):
        config = mnist.TrainingConfig(num_epochs=2, batch_size=10_000, model={"hidden_size": 8})
        report = mnist.train(config, *digits)
        assert [i.samples for i in report.history["Train"]] == [1438, 1438]
        assert [i.samples for i in report.history["Valid"]] == [359, 359]

    def test_empty_splits_are_said_and_do_no_harm(self, digits, capsys, tmp_path):
        nothing = _images.Images(*(array[:0] for array in digits[0]))
        config = mnist.TrainingConfig(num_epochs=1, workdir=str(tmp_path))
        report = mnist.train(config, nothing, nothing)
        out = capsys.readouterr().out
        assert "[Epoch 1] Train had no batches | Valid had no batches | " in out
        assert "Ended after 0 iterations." in out
        assert report.averages == {"Train": [], "Valid": []}
        assert (tmp_path / "curves.png").exists()

    def test_training_without_validation_images_works(self, digits, capsys):
        small = _images.Images(*(array[:64] for array in digits[0]))
        nothing = _images.Images(*(array[:0] for array in digits[0]))
        mnist.train(mnist.TrainingConfig(num_epochs=1), small, nothing)
        assert "% | Valid had no batches | " in capsys.readouterr().out


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["--learning_rate=1"], "Unknown command line flag 'learning_rate'"),
            (["--lr"], "Missing value for flag --lr"),
            (["--lr=fast"], "flag --lr=fast"),
            (["--lr=nan"], "`lr` got nan, expected a finite number"),
            (["--lr=inf"], "`lr` got inf, expected a finite number"),
            (["--lr=-1e-3"], "`lr` got -0.001, expected greater than or equal to 0"),
            (["--num_epochs=-1"], "`num_epochs` got -1"),
            (["--batch_size=0"], "`batch_size` got 0, expected greater than 0"),
            (["--batch_size=2.5"], "flag --batch_size=2.5"),
            (["--num_workers=-1"], "`num_workers` got -1"),
            (["--num_workers=99999"], "`num_workers` got 99999, expected less than or equal to"),
            ([f"--batch_size={2**63}"], f"`batch_size` got {2**63}, expected less than {2**63}"),
            (["--seed=-1"], "`seed` got -1"),
            (["--seed=4294967296"], "`seed` got 4294967296, expected less than 4294967296"),
            (["--log_every=0"], "`log_every` got 0"),
            (["--steps_per_execution=0"], "`steps_per_execution` got 0"),
            (
                ["--steps_per_execution=4", "--accumulate=2"],
                "`steps_per_execution` got 4, expected 1 beside accumulate > 1",
            ),
            (["--dataset=cifar"], "value should be one of <auto|mnist|digits>"),
            (["--jit_compile=maybe"], "--jit_compile=maybe"),
            (["--strategy=gpu:9"], "finds too few GPUs: got 0, expected at least 9"),
            (["--strategy=cpu:999"], "part the CPU too often: got 999, expected at most 16"),
            (["--strategy=abacus"], "knows no such devices: got str 'abacus'"),
            (["--model.hidden_size=0"], "`model.hidden_size` got 0"),
            (["--model.dropout=1"], "`model.dropout` got 1.0, expected less than 1"),
            (["--optimizer.beta_1=nan"], "`optimizer.beta_1` got nan"),
            (["1e-3"], "Unexpected argument '1e-3'"),
            (["--config=nowhere.json"], "`--config=nowhere.json` found no file"),
        ],
    )
    def test_it_is_one_line_and_exit_code_2(self, command, arguments, expected):
        code, out, err = command(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert expected in err

    @pytest.mark.parametrize("name", ["tensorflow_datasets", "matplotlib"])
    def test_a_package_that_is_missing_is_one_line(self, command, monkeypatch, tmp_path, name):
        monkeypatch.setitem(sys.modules, name, None)
        arguments = ["--dataset=digits", f"--workdir={tmp_path}", "--num_epochs=1"]
        code, out, err = command(*arguments)
        assert code == 2
        assert "Epoch" not in out
        assert err == (
            f"error: The examples need {name}: got the library alone. Install the rest from the "
            "checkout: pip install '.[examples]'\n"
        )

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("{", "found no JSON"),
            ("[]", "found no settings: got a JSON list"),
            ('{"lr": "1e-3"}', "`lr` got '1e-3', expected a valid number"),
            ('{"lrr": 1}', "unknown key 'lrr'. Did you mean 'lr'?"),
            ('{"model": {"hidden": 1}}', "unknown key 'model.hidden'. Did you mean 'hidden_size'?"),
        ],
    )
    def test_a_broken_config_file_is_one_line(self, command, tmp_path, text, expected):
        (tmp_path / "c.json").write_text(text)
        code, _, err = command(f"--config={tmp_path / 'c.json'}")
        assert (code, err.count("\n")) == (2, 1)
        assert expected in err

    @pytest.mark.usefixtures("few_digits")
    def test_a_work_folder_that_cannot_be_written_is_one_line(self, command, tmp_path):
        (tmp_path / "file").write_text("")
        for folder in (tmp_path / "file", tmp_path / "file" / "run", pathlib.Path("/proc/run")):
            code, _, err = command("--dataset=digits", f"--workdir={folder}")
            assert (code, err.count("\n")) == (2, 1)
            assert f"--workdir={folder} can't be written" in err

    @pytest.mark.parametrize("dataset", ["auto", "mnist"])
    @pytest.mark.parametrize("content", [None, "{", ""])
    def test_a_broken_data_set_is_one_line(self, command, tmp_path, dataset, content):
        folder = tmp_path / "mnist" / "3.0.1"
        folder.mkdir(parents=True)
        if content is not None:
            (folder / "dataset_info.json").write_text(content)
        code, out, err = command(f"--dataset={dataset}", f"--data_dir={tmp_path}")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"MNIST under --data_dir={tmp_path} can't be read: " in err

    def test_a_truncated_data_set_is_one_line(self, command, tmp_path, mnist_run):
        copy = tmp_path / "mnist" / "3.0.1"
        copy.mkdir(parents=True)
        for file in (pathlib.Path(MNIST_DIR) / "mnist" / "3.0.1").iterdir():
            (copy / file.name).write_bytes(file.read_bytes()[:100_000])
        code, _, err = command(f"--data_dir={tmp_path}")
        assert (code, err.count("\n")) == (2, 1)
        assert "can't be read: truncated record" in err

    def test_a_file_in_the_place_of_the_data_folder_is_one_line(self, command, tmp_path):
        (tmp_path / "file").write_text("")
        code, _, err = command(f"--data_dir={tmp_path / 'file'}")
        assert (code, err.count("\n")) == (2, 1)
        assert "file is a file" in err

    def test_mnist_that_cannot_be_had_is_one_line(self, command, tmp_path, monkeypatch):
        monkeypatch.setattr(_images, "_MNIST_FILE", "http://127.0.0.1:9/")
        code, _, err = command("--dataset=mnist", f"--data_dir={tmp_path}")
        assert (code, err.count("\n")) == (2, 1)
        assert "its host doesn't answer. Choose --dataset digits" in err


LAUNCHER = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # A shell's background job is started without it.
if os.isatty(0):
    os.close(os.open(os.ttyname(0), os.O_RDWR))  # Makes it the controlling terminal.
os.execv(sys.executable, [sys.executable, "-m", "tfloop.examples.mnist", *sys.argv[1:]])
"""


def example(*arguments, **options):
    """The example as a process of its own."""
    return Child("-c", LAUNCHER, "--dataset=digits", *arguments, **options)


def test_mixed_float16_trains_as_well(digits, digits_run):
    config, report = digits_run
    plain = report.averages["Valid"][4]
    model = config.model.replace(dtype="mixed_float16")
    low = config.replace(num_epochs=5, workdir=None, model=model)
    other = mnist.train(low, *digits).averages["Valid"][-1]
    assert plain.accuracy > 93
    assert abs(plain.accuracy - other.accuracy) <= 1.0  # 3 of 359 images
    assert abs(plain.loss - other.loss) < 0.02


REPLICAS = """
import json, sys
from tfloop.examples import mnist
for settings in json.loads(sys.argv[1]):
    mnist.main(mnist.TrainingConfig(strategy="cpu:2", dataset="digits", lr=1e-3, **settings))
"""
CURVES = {"num_epochs": 1, "batch_size": 99, "model": {"dropout": 0}}


@pytest.fixture(scope="module")
@again_after_native_abort
def on_two(tmp_path_factory):
    """Two runs on two replicas, in a process of their own: its lines, and a folder of curves."""
    folder = tmp_path_factory.mktemp("replicas") / "run"
    curves = CURVES | {"steps_per_execution": 4, "workdir": str(folder)}
    settings = json.dumps([{"num_epochs": 2, "accumulate": 2}, curves])
    with Child("-c", REPLICAS, settings) as process:
        done = process.result()
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), folder


class TestReplicas:
    def test_it_trains_on_two(self, on_two):
        valid = [line for line in on_two[0] if line.startswith("[Epoch 2]")]
        assert float(re.search(r"Valid .*accuracy ([\d.]+) %", valid[0]).group(1)) > 90

    def test_two_have_the_curves_of_one_device(self, on_two, digits, tmp_path):
        mnist.train(mnist.TrainingConfig(lr=1e-3, workdir=str(tmp_path), **CURVES), *digits)
        found = []
        for workdir in (tmp_path, on_two[1]):
            found.append(scalars(workdir / "train") | {"valid": scalars(workdir / "valid")})
            assert (workdir / "confusion.png").exists()
        one, two = found
        assert [step for step, _ in one["gradient_norm/all"]] == list(range(1, 16))
        flat = [
            [value for tag in sorted(run.keys() - {"valid"}) for _, value in run[tag]]
            + [value for tag in ("accuracy", "loss") for _, value in run["valid"][tag]]
            for run in (one, two)
        ]
        assert flat[1] == pytest.approx(flat[0], rel=1e-3)


class TestProcess:
    @again_after_native_abort
    def test_its_first_line_comes_soon_and_sigint_ends_it_cleanly_with_what_it_has(self, tmp_path):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        arguments = ["--lr=1e-3", "--num_epochs=1000", "--batch_size=600"]
        with example(*arguments, f"--workdir={tmp_path}") as process:
            process.wait_for("Epoch 2 - Iteration 0")
            process.send_signal(signal.SIGINT)
            done = process.result()
        lines = done.stdout.splitlines()
        # An epoch of three steps is over in 30 s of CPU time, which other processes don't slow.
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30
        assert lines[0].startswith("Data: scikit-learn's 1,797 UCI digits")
        assert re.fullmatch(LINE, lines[1]).groups() == ("Train", "1", "0")
        assert re.fullmatch(LINE, lines[2]).groups() == ("Valid", "1", "0")
        assert lines[3].startswith("[Epoch 1] Train loss ")
        assert "\x1b" not in done.stdout  # The progress bar is for terminals.
        assert done.returncode == 130, done.stderr
        assert "Traceback" not in done.stderr
        assert re.search(r"^Interrupted after \d+ iterations.$", done.stdout, re.MULTILINE)
        assert scalars(tmp_path / "valid")["loss"]
        assert (tmp_path / "curves.png").exists()

    @again_after_native_abort
    def test_ctrl_c_on_a_terminal_ends_it_and_the_bar(self, tmp_path):
        mine, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, "--dataset=digits", "--num_epochs=1000"],
            **{"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True},
            cwd=tmp_path,
            env=os.environ | {"TERM": "xterm"},
        )
        os.close(theirs)
        text, is_told = "", False
        with contextlib.suppress(OSError):  # The end of a terminal is an error on Linux.
            while chunk := os.read(mine, 4096).decode(errors="replace"):
                text += chunk
                if "Epoch 2" in text and not is_told:
                    os.write(mine, b"\x03")
                    is_told = True
        os.close(mine)
        check_not_aborted(process.wait(SILENCE))
        assert process.returncode == 130, text
        assert "Traceback" not in text
        assert re.search(r"Interrupted after \d+ iterations.", text)
        plain = re.sub(r"\x1b\[[\d;]*m", "", text)
        assert re.search(r"Train 1 [━╸╺]+ +\d+% \S+ loss \d\.\d{3} +\d+\.\d %", plain)
        assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # The cursor is back.
