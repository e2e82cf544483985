"""The figures against their definitions, computed here the long way round in float64."""

import itertools
import math
import weakref
from collections.abc import Sequence

import numpy as np
import pytest

from llmc.calibration.quality import compare, evaluation_windows

VOCAB = 11
WINDOWS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def noisy(scale: float) -> dict[tuple[int, ...], np.ndarray]:
    rng = np.random.default_rng(0)
    base = {tuple(w): rng.normal(size=(len(w), VOCAB)) * 3 for w in WINDOWS}
    noise = np.random.default_rng(1)
    return {w: (x + noise.normal(size=x.shape) * scale).astype(np.float32) for w, x in base.items()}


def test_against_the_definitions() -> None:
    a, b = noisy(0), noisy(0.7)
    quality = compare(WINDOWS, lambda w: a[tuple(w)], lambda w: (b[tuple(w)][i : i + 2] for i in range(0, len(w), 2)))
    losses, kl, same, cosines = [], [], [], []
    for window in map(tuple, WINDOWS):
        for t, (x, y) in enumerate(zip(a[window].astype(float), b[window].astype(float), strict=True)):
            p, q = np.exp(x) / np.exp(x).sum(), np.exp(y) / np.exp(y).sum()
            kl.append((p * np.log(p / q)).sum())
            same.append(p.argmax() == q.argmax())
            cosines.append(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
            if t + 1 < len(window):
                losses.append((-math.log(p[window[t + 1]]), -math.log(q[window[t + 1]])))
    assert quality.tokens == len(losses) == 6
    assert quality.reference_perplexity == pytest.approx(math.exp(np.mean([x for x, _ in losses])), rel=1e-5)
    assert quality.perplexity == pytest.approx(math.exp(np.mean([y for _, y in losses])), rel=1e-5)
    assert quality.kl == pytest.approx(np.mean(kl), rel=1e-4)
    assert quality.top1 == np.mean(same)
    assert quality.cosine_p5 == pytest.approx(np.percentile(cosines, 5), rel=1e-6)
    assert quality.perplexity_change == pytest.approx(quality.perplexity / quality.reference_perplexity - 1)


def test_a_model_beside_itself() -> None:
    a = noisy(0)
    quality = compare(WINDOWS, lambda w: a[tuple(w)], lambda w: [a[tuple(w)]])
    assert (quality.kl, quality.top1, quality.perplexity_change) == (0, 1, 0)
    assert quality.cosine_p5 == pytest.approx(1)
    assert quality.perplexity == quality.reference_perplexity


def test_uniform_logits_have_the_vocabulary_as_perplexity() -> None:
    a = noisy(0)
    quality = compare(WINDOWS, lambda w: a[tuple(w)], lambda w: [np.ones((len(w), VOCAB), np.float32)])
    assert quality.perplexity == pytest.approx(VOCAB)


@pytest.mark.parametrize(("rows", "columns"), [(0, 1), (1, 0), (-1, 0)])
def test_logits_of_another_shape_are_refused(rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match="logits of"):
        compare(WINDOWS, lambda w: np.ones((len(w), VOCAB)), lambda w: [np.ones((len(w) + rows, VOCAB + columns))])


def test_only_one_windows_logits_are_held() -> None:
    seen: list[weakref.ref[np.ndarray]] = []

    def logits(window: Sequence[int]) -> np.ndarray:
        assert all(values() is None for values in seen)
        values = np.ones((len(window), VOCAB), np.float32)
        seen.append(weakref.ref(values))
        return values

    compare(WINDOWS, logits, lambda w: (np.ones((1, VOCAB), np.float32) for _ in w))


def test_windows_are_apart_and_where_they_always_were() -> None:
    windows = evaluation_windows(lambda text: range(len(text) // 4))
    assert [(w[0], w[-1]) for w in windows[:2]] == [(1024, 1535), (5120, 5631)]
    assert (len(windows), {len(w) for w in windows}) == (12, {512})
    assert evaluation_windows(lambda text: range(len(text) // 4), 2, 128)[1] == list(range(5120, 5248))


def test_windows_move_together_in_a_text_of_fewer_tokens() -> None:
    windows = evaluation_windows(lambda text: range(12 * 600))
    assert all(later[0] > earlier[-1] for earlier, later in itertools.pairwise(windows))
    assert windows[-1][-1] < 12 * 600
    with pytest.raises(ValueError, match="do not fit"):
        evaluation_windows(lambda text: range(12 * 500))
