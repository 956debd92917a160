"""The scripts in examples/ run, and print what shows that their method works."""

import re

import pytest
from native import again_after_native_abort
from processes import Forks


@pytest.fixture(scope="module")
def run():
    """Gives what an example prints, run as a reader would run it."""

    @again_after_native_abort
    def printed(script: str, *arguments: str) -> str:
        done = forks.run(f"examples/{script}", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with Forks() as forks:
        yield printed


@pytest.mark.thorough
def test_finetuning_learns_more_from_few_samples_than_training_from_scratch(run):
    printed = run("finetune.py", "--quick")
    tuned, scratch = map(float, re.findall(r"accuracy (\d+\.\d) %", printed))
    assert tuned > 60.0 > scratch
    assert re.search(r"^Conv1\.kernel .* frozen$", printed, re.M)
    assert re.search(r"^head\.bias .*from_name\('beta', 'bias', 'gamma'\) .* -$", printed, re.M)


def numbers(text: str) -> list[float]:
    """The last number of each line that begins with a word, in order."""
    return [
        float(found)
        for found in re.findall(r"^  [a-z].*?(-?[\d.]+(?:e-?\d+)?)(?: %)?$", text, re.M)
    ]


def test_the_samples_of_the_gan_come_near_to_real_digits(run):
    before, after, real = numbers(run("gan.py", "--quick"))
    assert real < after < 0.2 * before


def test_the_student_learns_more_from_the_teacher_than_from_its_labels(run):
    teacher, alone, taught = numbers(run("distillation.py", "--quick"))
    assert alone + 5.0 < taught < teacher + 2.0


@pytest.mark.thorough
def test_adversarial_training_withstands_attacks(run):
    printed = run("adversarial.py", "--quick")
    rows = re.findall(r"^  .*images +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.M)
    (plain, _, plain_pgd), (robust, _, robust_pgd) = (map(float, row) for row in rows)
    assert min(plain, robust) > 80.0
    assert plain_pgd < 30.0 < robust_pgd - 10.0


def test_the_cheap_task_helps_the_one_with_few_labels(run):
    printed = run("multitask.py", "--quick")
    alone, both = numbers(printed)
    assert both > alone + 3.0
    assert re.search(r"^trunk\.dense\.kernel .* all\(\) +Adam ", printed, re.M)
    assert re.search(r"^number\.dense\.kernel .* from_name\('number'\) +AdamW ", printed, re.M)


@pytest.mark.thorough
def test_the_penalty_holds_the_slope_at_one_and_makes_scores_a_distance(run):
    printed = run("gradient_penalty.py", "--quick")
    exact = float(re.search(r"exact distance is ([\d.]+)", printed)[1])
    rows = re.findall(r"penalty +([\d.]+) +([\d.]+)$", printed, re.M)
    (free_norm, free), (norm, estimate) = (map(float, row) for row in rows)
    assert free_norm > 100.0
    assert 0.8 < norm < 1.2
    assert 0.8 * exact < estimate < 1.1 * exact < free


def test_the_mean_teacher_learns_from_images_without_labels(run):
    alone, student, teacher = numbers(run("ema_teacher.py", "--quick"))
    assert min(student, teacher) > alone + 2.0


def test_sam_finds_flat_places_that_fit_clean_digits(run):
    printed = run("sam.py", "--quick")
    rows = re.findall(r"^  S.. .* ([\d.]+) %  +([\d.]+)$", printed, re.M)
    (sgd, sgd_sharpness), (sam, sam_sharpness) = (map(float, row) for row in rows)
    assert sam > sgd + 5.0
    assert sam_sharpness < 0.5 * sgd_sharpness


@pytest.mark.thorough
def test_meta_trained_weights_fit_a_new_task_in_one_step(run):
    printed = run("maml.py", "--quick")
    rows = re.findall(r"^  \w.* +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.M)
    (_, at_once, _), (before, after, later) = (map(float, row) for row in rows)
    assert after < 0.7 * min(before, at_once)
    assert later < after


@pytest.mark.thorough
def test_features_learned_without_labels_beat_pixels(run):
    pixels, untrained, trained = numbers(run("contrastive.py", "--quick", "--strategy=cpu:2"))
    assert trained > max(pixels, untrained) + 4.0


@pytest.mark.thorough
def test_the_pole_stays_up_after_q_learning(run):
    before, *_, after = numbers(run("dqn.py", "--quick"))
    assert before < 50.0
    assert after > 400.0


def test_small_batches_add_up_to_the_large_one(run):
    accumulated, microbatch, unweighted = numbers(run("big_batch.py", "--quick"))
    assert max(accumulated, microbatch) < 1e-5
    assert unweighted > 1e-3
