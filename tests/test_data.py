import collections
import itertools
import operator
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfloop
from tfloop.data import _sources

Pair = collections.namedtuple("Pair", "x y")


def rows(loader):
    """All items of one epoch, as a flat list."""
    return [int(item) for batch in loader for item in batch]


def sizes(loader):
    return [len(batch) for batch in loader]


def sources(n):
    """The same items as an array, a tensor and a data set."""
    numbers = np.arange(n)
    return [numbers, tf.constant(numbers), tf.data.Dataset.from_tensor_slices(numbers)]


every_source = pytest.mark.parametrize("source", [0, 1, 2], ids=["array", "tensor", "dataset"])
shuffling = pytest.mark.parametrize("shuffle", [None, 7], ids=["in-order", "shuffled"])


class TestBatches:
    @every_source
    def test_a_loader_yields_the_items_in_order(self, source):
        loader = tfloop.DataLoader(sources(27)[source], batch_size=5)
        assert [b.numpy().tolist() for b in loader][1] == [5, 6, 7, 8, 9]
        assert rows(loader) == list(range(27))

    @every_source
    @shuffling
    def test_the_last_short_batch_is_kept(self, source, shuffle):
        loader = tfloop.DataLoader(sources(27)[source], batch_size=5, shuffle=shuffle)
        assert sizes(loader) == [5, 5, 5, 5, 5, 2]
        assert (len(loader), loader.num_items) == (6, 27)

    @every_source
    @shuffling
    def test_drop_last_leaves_the_short_batch_out(self, source, shuffle):
        loader = tfloop.DataLoader(
            sources(27)[source], batch_size=5, shuffle=shuffle, drop_last=True
        )
        assert sizes(loader) == [5] * 5
        assert (len(loader), loader.num_items) == (5, 25)

    @every_source
    def test_a_whole_number_of_batches_has_no_short_one(self, source):
        assert sizes(tfloop.DataLoader(sources(25)[source], batch_size=5)) == [5] * 5

    @every_source
    @shuffling
    def test_empty_data_makes_an_empty_loader(self, source, shuffle):
        loader = tfloop.DataLoader(sources(0)[source], batch_size=5, shuffle=shuffle)
        assert rows(loader) == []
        assert (len(loader), loader.num_items) == (0, 0)

    @every_source
    @shuffling
    def test_a_batch_size_beyond_the_data_gives_one_short_batch(self, source, shuffle):
        loader = tfloop.DataLoader(sources(3)[source], batch_size=100, shuffle=shuffle)
        assert sizes(loader) == [3]

    def test_an_array_of_strings_or_bools_is_batched_too(self):
        names, flags = np.array(["a", "bb", "c"]), np.array([True, False, True])
        (batch,) = tfloop.DataLoader((names, flags), batch_size=3, shuffle=1)
        assert sorted(zip(batch[0].numpy(), batch[1].numpy(), strict=True)) == [
            (b"a", True),
            (b"bb", False),
            (b"c", True),
        ]

    def test_batches_are_eager_tensors_with_the_dtype_of_the_array(self):
        for dtype in (np.uint8, np.float16, np.float64, np.int32):
            (batch,) = tfloop.DataLoader(np.zeros(2, dtype), batch_size=2)
            assert tf.is_tensor(batch)
            assert isinstance(batch.numpy(), np.ndarray)
            assert batch.dtype == dtype

    def test_the_arrays_are_copied_so_later_writes_do_not_show(self):
        array = np.zeros(4)
        loader = tfloop.DataLoader(array, batch_size=4)
        array[:] = 1
        assert rows(loader) == [0, 0, 0, 0]


class TestStructures:
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)

    @pytest.mark.parametrize("shuffle", [None, 3])
    def test_structures_come_back_as_they_went_in(self, shuffle):
        for data in (
            {"x": self.x, "y": self.y},
            (self.x, self.y),
            Pair(self.x, self.y),
            {"in": Pair(self.x, {"y": self.y}), "z": (self.y,)},
        ):
            for batch in tfloop.DataLoader(data, batch_size=4, shuffle=shuffle):
                tf.nest.assert_same_structure(batch, data)
                leaves = tf.nest.flatten(batch)
                assert len({len(leaf) for leaf in leaves}) == 1

    def test_rows_of_one_item_stay_together_under_a_shuffle(self):
        for batch in tfloop.DataLoader(Pair(self.x, self.y), batch_size=4, shuffle=3):
            np.testing.assert_array_equal(batch.x[:, 0], 2.0 * batch.y.numpy())

    def test_a_list_comes_back_as_a_tuple(self):
        (batch,) = tfloop.DataLoader([self.x, [self.y, self.y]], batch_size=6)
        assert type(batch) is tuple
        assert type(batch[1]) is tuple

    def test_things_that_numpy_understands_are_arrays(self):
        class Series:
            def __array__(self, dtype=None, copy=None):
                return np.arange(3)

        assert rows(tfloop.DataLoader(Series(), batch_size=2)) == [0, 1, 2]


class TestBatcher:
    def test_it_gets_the_whole_batch_in_one_argument(self):
        for data in ((np.arange(4), np.ones(4)), Pair(np.arange(4), np.ones(4))):
            for source in (data, tf.data.Dataset.from_tensor_slices(data)):
                loader = tfloop.DataLoader(source, lambda b: b[0] + len(b), batch_size=4)
                assert rows(loader) == [2, 3, 4, 5]

    @every_source
    def test_it_may_change_the_structure(self, source):
        loader = tfloop.DataLoader(sources(4)[source], lambda b: Pair(b, {"y": -b}), batch_size=2)
        batch = next(iter(loader))
        assert isinstance(batch, Pair)
        assert batch.y["y"].numpy().tolist() == [0, -1]

    def test_its_python_branches_on_tensors_are_converted(self):
        def batcher(batch):
            if tf.reduce_sum(batch) > 1:
                return batch
            return -batch

        assert rows(tfloop.DataLoader(np.arange(4), batcher, batch_size=2)) == [0, -1, 2, 3]

    def test_it_is_traced_once_for_all_epochs_and_the_short_batch(self):
        traces = []

        def batcher(batch):
            traces.append(1)
            return batch

        loader = tfloop.DataLoader(np.arange(5), batcher, batch_size=2, shuffle=1)
        for _ in range(3):
            rows(loader)
        assert len(traces) == 1

    @pytest.mark.parametrize("num_workers", [None, 0, 2])
    def test_an_error_at_run_time_reaches_the_loop_and_names_the_batch(self, num_workers):
        def batcher(batch):
            with tf.control_dependencies(
                [tf.debugging.assert_less(batch, np.int64(4), "too large")]
            ):
                return tf.identity(batch)

        loader = tfloop.DataLoader(np.arange(8), batcher, batch_size=2, num_workers=num_workers)
        seen = []
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large") as caught:
            seen += list(loader)
        assert "batch 2, counted from 0" in caught.value.__notes__[0]

    def test_an_error_at_trace_time_keeps_the_users_line(self):
        def batcher(batch):
            return batch["images"]

        loader = tfloop.DataLoader({"image": np.ones(3)}, batcher, batch_size=2)
        with pytest.raises(KeyError, match="images") as caught:
            iter(loader)
        assert 'return batch["images"]' in str(caught.value)
        assert "tf.numpy_function" in caught.value.__notes__[0]

    def test_one_that_returns_nothing_raises(self):
        loader = tfloop.DataLoader(np.ones(3), lambda batch: None, batch_size=2)
        with pytest.raises(TypeError, match="got None, expected tensors. Its `return` may be"):
            iter(loader)


class TestOrder:
    @every_source
    def test_each_iter_is_the_next_epoch_with_an_order_of_its_own(self, source):
        loader = tfloop.DataLoader(sources(50)[source], batch_size=8, shuffle=1)
        epochs = [rows(loader) for _ in range(3)]
        assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3

    @every_source
    def test_the_order_depends_on_seed_and_epoch_alone(self, source):
        def epochs(**options):
            loader = tfloop.DataLoader(sources(50)[source], batch_size=8, **options)
            return [rows(loader) for _ in range(2)]

        expected = epochs(shuffle=1)
        for options in ({"num_workers": 0}, {"num_workers": 3}, {"prefetch": False}):
            assert epochs(shuffle=1, **options) == expected
        for global_seed in (3, 4):
            tf.random.set_seed(global_seed)
            np.random.seed(global_seed)
            assert epochs(shuffle=1) == expected
        assert epochs(shuffle=2) != expected

    def test_the_order_of_arrays_is_numpys_permutation(self):
        loader = tfloop.DataLoader(np.arange(50), batch_size=8, shuffle=9)
        for epoch in range(3):
            expected = np.random.Generator(np.random.PCG64([9, epoch])).permutation(50)
            assert rows(loader) == expected.tolist()

    def test_the_batch_size_does_not_change_the_order(self):
        orders = [rows(tfloop.DataLoader(np.arange(50), batch_size=b, shuffle=1)) for b in (1, 7)]
        assert orders[0] == orders[1]

    def test_shuffled_batches_mix_what_unshuffled_ones_keep_apart(self):
        data = np.concatenate([np.zeros(100, int), np.ones(100, int)])
        plain = tfloop.DataLoader(data, batch_size=20, num_workers=2)
        mixed = tfloop.DataLoader(data, batch_size=20, num_workers=2, shuffle=42)
        assert [len(set(b.numpy())) for b in plain] == [1] * 10
        assert sum(len(set(b.numpy())) == 2 for b in mixed) >= 9
        assert sizes(plain) == sizes(mixed)

    def test_a_dataset_of_known_length_is_shuffled_as_a_whole(self):
        dataset = tf.data.Dataset.range(5000)
        first = rows(tfloop.DataLoader(dataset, batch_size=100, shuffle=1).take(1))
        assert max(first) > 4500

    def test_a_dataset_that_may_not_fit_is_shuffled_through_a_bounded_buffer(self):
        # A text of unknown length counts as 16 KiB, so that 256 MiB hold 2**14 of them.
        texts = tf.data.Dataset.range(2**16).map(tf.strings.as_string)
        first = next(iter(tfloop.DataLoader(texts, batch_size=64, shuffle=1)))
        assert 2**12 < max(int(text) for text in first.numpy()) < 2**14 + 64

    def test_a_few_items_of_unknown_number_take_little_memory_and_time(self):
        program = (
            "import time, tensorflow as tf, tfloop\n"
            "def held():\n"
            "    return int(open('/proc/self/statm').read().split()[1]) * 4096 / 2**20\n"
            "items = tf.data.Dataset.range(23).filter(lambda n: n >= 0)\n"
            "list(items.shuffle(23).batch(4))\n"
            "before, start = held(), time.process_time()\n"
            "batches = iter(tfloop.DataLoader(items, batch_size=4, shuffle=1))\n"
            "next(batches)\n"
            "assert held() - before < 100, held() - before\n"
            "assert time.process_time() - start < 1.5\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120)

    def test_the_order_of_data_that_fit_does_not_depend_on_the_size_of_the_buffer(self):
        known = tf.data.Dataset.range(500)
        unknown = known.filter(lambda n: n >= 0)
        orders = [rows(tfloop.DataLoader(d, batch_size=7, shuffle=3)) for d in (known, unknown)]
        assert orders[0] == orders[1]
        assert sorted(orders[0]) == list(range(500))

    def test_pinning_the_shuffle_leaves_random_batchers_alone(self):
        def noise():
            data = tf.data.Dataset.range(4)
            loader = tfloop.DataLoader(
                data, lambda _: tf.random.uniform([1]), batch_size=4, shuffle=1
            )
            return float(next(iter(loader))[0])

        tf.random.set_seed(1)
        first = noise()
        tf.random.set_seed(2)
        assert noise() != first


class TestHints:
    @every_source
    def test_an_iterator_knows_how_many_batches_are_left(self, source):
        loader = tfloop.DataLoader(sources(23)[source], batch_size=5)
        for view in (loader, loader.skip(1).take(3)):
            batches = iter(view)
            assert operator.length_hint(batches, -1) == len(view)
            left = [operator.length_hint(batches, -1) for _ in batches]
            assert left == [*range(len(view))][::-1]

    def test_of_unknown_length_it_says_nothing(self):
        items = tf.data.Dataset.range(9).filter(lambda n: n > 0)
        assert operator.length_hint(iter(tfloop.DataLoader(items, batch_size=2)), -1) == -1
        endless = tfloop.DataLoader(tf.data.Dataset.range(9).repeat(), batch_size=2)
        assert operator.length_hint(iter(endless), -1) == -1
        assert operator.length_hint(iter(endless.take(4)), -1) == 4


class TestViews:
    def test_take_and_skip_count_batches(self):
        loader = tfloop.DataLoader(np.arange(20), batch_size=5)
        assert rows(loader.skip(1).take(2)) == list(range(5, 15))
        assert rows(loader.take(3).skip(1)) == list(range(5, 15))
        assert rows(loader.take(0)) == []
        assert rows(loader.take(9)) == list(range(20))
        assert rows(loader.skip(9)) == []

    @every_source
    @pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**63, 10**30])
    def test_any_count_above_the_number_of_batches_is_all_of_them(self, source, count):
        loader = tfloop.DataLoader(sources(5)[source], batch_size=2)
        assert rows(loader.take(count)) == [0, 1, 2, 3, 4]
        assert rows(loader.skip(count)) == []

    @every_source
    def test_they_equal_those_of_a_batched_dataset(self, source):
        loader = tfloop.DataLoader(sources(23)[source], batch_size=5)
        batched = tf.data.Dataset.range(23).batch(5)
        for first, second in itertools.product((0, 1, 4, 5, 7), repeat=2):
            for mine, theirs in (
                (loader.skip(first).take(second), batched.skip(first).take(second)),
                (loader.take(first).skip(second), batched.take(first).skip(second)),
            ):
                expected = [b.numpy().tolist() for b in theirs]
                assert [b.numpy().tolist() for b in mine] == expected
                assert len(mine) == len(expected)
                assert mine.num_items == sum(map(len, expected))

    def test_a_view_of_a_shuffled_loader_is_that_part_of_the_same_epoch(self):
        def loader():
            return tfloop.DataLoader(np.arange(20), batch_size=5, shuffle=1)

        whole, part = loader(), loader().skip(1).take(2)
        for _ in range(3):
            assert rows(part) == rows(whole)[5:15]

    def test_a_loop_over_take_sees_new_items_every_epoch(self):
        loader = tfloop.DataLoader(np.arange(100), batch_size=5, shuffle=1)
        assert len({tuple(rows(loader.take(2))) for _ in range(3)}) == 3

    def test_drop_last_holds_in_views(self):
        loader = tfloop.DataLoader(np.arange(23), batch_size=5, drop_last=True)
        assert rows(loader.skip(3)) == [15, 16, 17, 18, 19]
        assert loader.skip(3).num_items == 5


class TestUnknownLength:
    dataset = tf.data.Dataset.range(10).filter(lambda i: i % 2 == 0)

    def test_num_items_is_none_and_len_raises(self):
        loader = tfloop.DataLoader(self.dataset, batch_size=2)
        assert loader.num_items is None
        with pytest.raises(TypeError, match="unknown or infinite cardinality.*assert_cardinality"):
            len(loader)
        assert loader
        assert rows(loader) == [0, 2, 4, 6, 8]

    def test_it_can_be_shuffled(self):
        loader = tfloop.DataLoader(self.dataset, batch_size=2, shuffle=1)
        assert sorted(rows(loader)) == [0, 2, 4, 6, 8]

    def test_an_endless_dataset_has_a_length_once_it_is_cut(self):
        loader = tfloop.DataLoader(tf.data.Dataset.range(3).repeat(), batch_size=2)
        assert loader.num_items is None
        assert (len(loader.take(4)), loader.take(4).num_items) == (4, 8)
        assert rows(loader.take(4)) == [0, 1, 2, 0, 1, 2, 0, 1]

    def test_asserting_the_cardinality_gives_the_length(self):
        dataset = self.dataset.apply(tf.data.experimental.assert_cardinality(5))
        assert len(tfloop.DataLoader(dataset, batch_size=2)) == 3


class TestEarlyEnd:
    @every_source
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_after_an_early_drop_the_next_epoch_is_whole(self, source, num_workers):
        loader = tfloop.DataLoader(sources(40)[source], batch_size=4, num_workers=num_workers)
        for _ in range(5):
            for _ in loader:
                break
        assert rows(loader) == list(range(40))

    def test_three_epochs_are_whole(self):
        loader = tfloop.DataLoader(np.arange(41), batch_size=4, num_workers=2, shuffle=5)
        assert [sorted(rows(loader)) for _ in range(3)] == [list(range(41))] * 3

    def test_an_exhausted_iterator_stays_exhausted(self):
        iterator = iter(tfloop.DataLoader(np.arange(2), batch_size=2))
        assert len(list(iterator)) == 1
        assert list(iterator) == []


class TestResume:
    @staticmethod
    def loader(source, shuffle=3, **options):
        return tfloop.DataLoader(sources(22)[source], batch_size=4, shuffle=shuffle, **options)

    @every_source
    @shuffling
    @pytest.mark.parametrize("given", [0, 1, 3, 5, 6])
    def test_a_restored_loader_gives_the_batches_that_were_left(
        self, source, shuffle, given, tmp_path
    ):
        uninterrupted = self.loader(source, shuffle)
        expected = [rows(uninterrupted) for _ in range(4)]

        loader = self.loader(source, shuffle)
        assert rows(loader) == expected[0]
        iterator = iter(loader)
        assert rows(itertools.islice(iterator, given)) == expected[1][: 4 * given]
        path = tf.train.Checkpoint(loader=loader).save(str(tmp_path / "c"))

        restored = self.loader(source, shuffle, num_workers=2)
        tf.train.Checkpoint(loader=restored).restore(path)
        assert rows(restored) == expected[1][4 * given :]
        assert [rows(restored) for _ in range(2)] == expected[2:]

    def test_a_record_between_two_epochs_starts_the_next(self):
        loader, restored = self.loader(0), self.loader(0)
        first = rows(loader)
        record = loader.serialize()
        second = rows(loader)
        restored.deserialize(record)
        assert rows(restored) == second != first

    def test_a_loader_that_is_restored_while_it_runs_goes_back(self):
        loader = self.loader(0)
        running = iter(loader)
        next(running)
        record = loader.serialize()
        left = [batch.numpy().tolist() for batch in running]
        stale = iter(loader)
        loader.deserialize(record)
        next(stale)  # The old iterator no longer moves the place.
        assert loader.serialize() == record
        assert [batch.numpy().tolist() for batch in loader] == left

    def test_only_the_newest_iterator_moves_the_place(self):
        loader = self.loader(0)
        old, new = iter(loader), iter(loader)
        next(new)
        record = loader.serialize()
        list(old)
        assert loader.serialize() == record

    def test_the_place_is_shared_with_views(self):
        loader = self.loader(0)
        part = loader.take(4)
        expected = rows(self.loader(0).take(4))
        iterator = iter(part)
        next(iterator)
        restored = self.loader(0)
        restored.deserialize(loader.serialize())
        assert rows(restored.take(4)) == expected[4:]

    def test_the_end_of_a_take_ends_the_epoch(self):
        loader, whole = self.loader(0), self.loader(0)
        epochs = [rows(whole) for _ in range(2)]
        assert rows(loader.take(2)) == epochs[0][:8]
        restored = self.loader(0)
        restored.deserialize(loader.serialize())
        assert rows(restored) == epochs[1]

    def test_a_skipped_start_is_counted(self):
        loader = self.loader(0, shuffle=None)
        iterator = iter(loader.skip(2))
        next(iterator)
        restored = self.loader(0, shuffle=None)
        restored.deserialize(loader.serialize())
        assert rows(restored.skip(2)) == list(range(12, 22))

    @pytest.mark.parametrize(
        "changed",
        [{"batch_size": 5}, {"shuffle": 4}, {"drop_last": True}, {"dataset": np.arange(9)}],
        ids=["batch_size", "shuffle", "drop_last", "num_items"],
    )
    def test_another_order_is_refused_in_the_middle_of_an_epoch(self, changed):
        options = {"dataset": np.arange(22), "batch_size": 4, "shuffle": 3}
        loader = tfloop.DataLoader(**options)
        next(iter(loader))
        other = tfloop.DataLoader(**{**options, **changed})
        before = other.serialize()
        with pytest.raises(ValueError, match="in the middle of an epoch: got a record of {'.*': "):
            other.deserialize(loader.serialize())
        assert other.serialize() == before

    def test_another_batch_size_is_fine_between_epochs(self):
        loader = self.loader(0)
        rows(loader)
        other = tfloop.DataLoader(np.arange(22), batch_size=5, shuffle=3)
        other.deserialize(loader.serialize())
        assert rows(other) == rows(loader)

    @settings(deadline=None, max_examples=25)
    @given(
        n=st.integers(0, 30),
        size=st.integers(1, 9),
        given=st.integers(0, 31),
        drop=st.booleans(),
    )
    def test_given_and_left_make_the_epoch_whatever_the_sizes(self, n, size, given, drop):
        def loader():
            return tfloop.DataLoader(np.arange(n), batch_size=size, shuffle=1, drop_last=drop)

        whole, broken, restored = loader(), loader(), loader()
        epochs = [rows(whole), rows(whole)]
        first = rows(itertools.islice(iter(broken), given))
        restored.deserialize(broken.serialize())
        # Asking for one batch too many ends the epoch; what is left is then the next one.
        ended = given > len(whole)
        assert first + rows(restored) == (epochs[0] + epochs[1] if ended else epochs[0])


class TestAsDataset:
    def test_it_is_the_epoch_that_iter_would_give(self):
        def loader():
            return tfloop.DataLoader(np.arange(20), batch_size=5, shuffle=1)

        mine, theirs = loader(), loader()
        for _ in range(3):
            dataset = mine.as_dataset()
            assert isinstance(dataset, tf.data.Dataset)
            expected = rows(theirs)
            assert rows(dataset) == expected
            assert rows(dataset) == expected

    def test_it_goes_through_a_tf_function(self):
        @tf.function
        def total(dataset):
            result = tf.constant(0, tf.int64)
            for batch in dataset:
                result += tf.reduce_sum(batch)
            return result

        loader = tfloop.DataLoader(np.arange(20), batch_size=5, drop_last=True)
        assert int(total(loader.as_dataset())) == 190

    def test_drop_last_makes_the_batch_size_static(self):
        loader = tfloop.DataLoader(np.zeros((20, 3)), batch_size=5, drop_last=True)
        assert loader.as_dataset().element_spec.shape == (5, 3)

    def test_after_a_restore_it_is_what_was_left(self):
        loader = tfloop.DataLoader(np.arange(20), batch_size=5)
        next(iter(loader))
        restored = tfloop.DataLoader(np.arange(20), batch_size=5)
        restored.deserialize(loader.serialize())
        assert rows(restored.as_dataset()) == list(range(5, 20))


class TestRefusals:
    def test_a_loader_in_a_traced_function_raises(self):
        loader = tfloop.DataLoader(np.arange(4), batch_size=2)

        @tf.function(autograph=False)
        def step():
            return sum(tf.reduce_sum(batch) for batch in loader)

        with pytest.raises(RuntimeError, match="inside a `tf.function`.*loader.as_dataset"):
            step()

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_a_bool_is_no_seed(self, shuffle):
        with pytest.raises(TypeError, match=rf"`shuffle`: got bool {shuffle}.*Pass `shuffle=42`"):
            tfloop.DataLoader(np.ones(2), batch_size=1, shuffle=shuffle)

    @pytest.mark.parametrize(
        ("name", "value", "error"),
        [
            ("batch_size", 0, ValueError),
            ("batch_size", -1, ValueError),
            ("batch_size", 2.0, TypeError),
            ("batch_size", True, TypeError),
            ("batch_size", None, TypeError),
            ("shuffle", -1, ValueError),
            ("shuffle", "42", TypeError),
            ("num_workers", -1, ValueError),
            ("num_workers", 1.5, TypeError),
        ],
    )
    def test_a_number_that_makes_no_sense_raises(self, name, value, error):
        options = {"batch_size": 2, name: value}
        with pytest.raises(error, match=f"takes no such `{name}`: got .*{value}.*expected an int"):
            tfloop.DataLoader(np.ones(2), **options)

    @pytest.mark.parametrize(("name", "most"), [("batch_size", 2**63 - 1), ("num_workers", 1024)])
    def test_a_number_that_tensorflow_does_not_survive_raises(self, name, most):
        data = np.arange(5)
        assert rows(tfloop.DataLoader(data, **{"batch_size": 2, name: most})) == [0, 1, 2, 3, 4]
        with pytest.raises(ValueError, match=f"no such `{name}`: got {most + 1}, .* most {most}"):
            tfloop.DataLoader(data, **{"batch_size": 2, name: most + 1})

    def test_a_stack_of_more_batches_than_there_are_is_none(self):
        loader = tfloop.DataLoader(np.arange(5), lambda batch: batch, batch_size=1)
        batches = iter(loader)
        assert batches.stack(10**19) is None
        assert batches.stack(6) is None
        assert batches.stack(5).shape == (5, 1)

    @pytest.mark.parametrize("view", ["take", "skip"])
    def test_a_negative_count_raises(self, view):
        loader = tfloop.DataLoader(np.ones(2), batch_size=1)
        with pytest.raises(ValueError, match=rf"loader.{view}\(count\).*got -1"):
            getattr(loader, view)(-1)

    def test_numpy_integers_are_numbers(self):
        loader = tfloop.DataLoader(np.arange(4), batch_size=np.int64(2), shuffle=np.int32(1))
        assert len(loader) == 2

    def test_a_batch_size_in_the_place_of_the_batcher_raises(self):
        with pytest.raises(TypeError, match="can't call its batcher: got int 32.*batch_size=64"):
            tfloop.DataLoader(np.ones(2), 32, batch_size=2)

    def test_arrays_of_unequal_length_are_named(self):
        data = {"images": np.ones((3, 2)), "labels": (np.ones(4), np.ones(3))}
        with pytest.raises(ValueError, match=r"\['images'\]: 3.*\['labels'\]\[0\]: 4"):
            tfloop.DataLoader(data, batch_size=2)

    def test_generators_and_functions_raise(self):
        for data in ((i for i in range(3)), iter([1]), lambda: None):
            with pytest.raises(TypeError, match="generator can't be rewound.*from_generator"):
                tfloop.DataLoader(data, batch_size=2)

    def test_a_distributed_dataset_raises(self):
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")
        data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
        with pytest.raises(TypeError, match="spread over replicas already.*tfloop.compile"):
            tfloop.DataLoader(data, batch_size=2)

    def test_plain_numbers_and_texts_are_no_arrays(self):
        for data, where in (([1, 2], r"at `dataset\[0\]`"), ("abc", "got"), ({"a": None}, "'a'")):
            with pytest.raises(TypeError, match=f"{where}.*numpy.asarray"):
                tfloop.DataLoader(data, batch_size=2)

    def test_ragged_and_sparse_tensors_raise(self):
        for data in (tf.ragged.constant([[1], [1, 2]]), tf.sparse.eye(3)):
            with pytest.raises(TypeError, match="no common shape to gather.*from_tensor_slices"):
                tfloop.DataLoader(data, batch_size=2)

    def test_a_scalar_or_nothing_raises(self):
        with pytest.raises(
            ValueError, match=r"can't batch a scalar: got shape \(\) at `dataset\[1\]"
        ):
            tfloop.DataLoader((np.ones(3), np.float32(1)), batch_size=2)
        with pytest.raises(ValueError, match="holds no arrays: got an empty structure"):
            tfloop.DataLoader({}, batch_size=2)


def test_repr_tells_what_it_holds():
    loader = tfloop.DataLoader(np.ones(60), batch_size=8, shuffle=42)
    assert repr(loader) == "DataLoader(60 items, batch_size=8, shuffle=42)"
    endless = tfloop.DataLoader(tf.data.Dataset.range(3).repeat(), batch_size=8)
    assert repr(endless) == "DataLoader(unknown items, batch_size=8, shuffle=None)"


def test_a_namedtuple_of_the_batcher_reaches_a_compiled_step():
    loader = tfloop.DataLoader(np.arange(5.0), lambda b: Pair(b, b), batch_size=2)
    step = tfloop.compile(lambda batch: tf.reduce_sum(batch.x * batch.y))
    assert [float(step(batch)) for batch in loader] == [1.0, 13.0, 16.0]
    assert step.trace_count <= 2


@pytest.mark.parametrize("options", [{}, {"shuffle": 3}, {"shuffle": 3, "drop_last": True}])
def test_small_batches_are_those_of_the_pipeline(monkeypatch, options):
    numbers = np.arange(22)
    several = (np.arange(44.0).reshape(22, 2), numbers.astype("uint8"))
    found = []
    for light in (2**19, 0):
        monkeypatch.setattr(_sources, "_LIGHT_BYTES", light)
        batches = []
        structures = ({"b": numbers, "a": several}, Pair(*several), (numbers,), numbers > 4)
        for data in (numbers, several, *structures):
            loader = tfloop.DataLoader(data, batch_size=4, **options)
            epochs = [list(loader), list(loader.skip(1).take(3))]
            iterator = iter(loader)
            epochs.append([next(iterator), next(iterator)])
            epochs.append(list(loader))  # what was left
            iterator = iter(loader)
            epochs.append([next(iterator), iterator.stack(2), iterator.stack(2), *iterator])
            epochs.append(list(tfloop.DataLoader(data, batch_size=4, **options).as_dataset()))
            batches.append(epochs)
        found.append(batches)
    tf.nest.assert_same_structure(*found)
    for one, other in zip(*map(tf.nest.flatten, found), strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        np.testing.assert_array_equal(one, other)


def test_only_small_batches_of_plain_arrays_are_gathered_in_the_loop():
    def is_light(data, **options):
        loader = tfloop.DataLoader(data, batch_size=64, **options)
        return not isinstance(loader._singles(0, 0), tf.data.Dataset)

    assert is_light(np.zeros((100, 28, 28), "uint8"))
    assert not is_light(np.zeros((100, 224, 224), "uint8"))
    assert not is_light(np.array(["a"] * 100))
    assert not is_light(np.zeros((100, 28, 28)), batcher=lambda x: x)
    assert not is_light(tf.data.Dataset.range(100))
