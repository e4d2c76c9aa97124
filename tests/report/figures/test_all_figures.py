"""The list of figures: each is drawn from a run that has something to show in all of them."""

from collections import Counter
from dataclasses import replace
from typing import Any

from attn_zoo.report.figures.all_figures import FIGURES
from tests.report.figures.legible import assert_legible, assert_whole_marks, pictures
from tests.report.synthetic import CLAIMS, accuracy, approximation, costed, curve, exchanged, roof, scaling, tuned


def everything(tmp_path):
    lengths = (512, 1024, 2048)
    timed = [costed(scaling(name, n), n**2 * 100, n * 500) for name in CLAIMS for n in lengths]
    records = [replace(record, energy_joules=1e-6 * (record.cell.seq_len or 0)) for record in timed]
    cells = [{"seq_len": n, "value": 40 / n, "num_items": 9.0} for n in (64.0, 128.0, 256.0)]
    for place, name in enumerate(CLAIMS):
        score = {"curve": curve(0.1, 0.4), "train_flops": 2e13, "breakdown": tuple(cells)}
        value = 0.3 + 0.1 * place
        records += [accuracy(name, seed, value, task=task, score=score) for task in ("a", "b") for seed in (0, 1)]
        records += tuned(name, {1e-4: (0.3, 0.4), 1e-3: (0.5, 0.5)})
        records += [exchanged(name, seed, value, error=0.2 * place) for seed in (0, 1)]
        small: dict[str, Any] = {"label": f"{name} small", "options": {"size": 4}}
        for seed in (0, 1):
            records += [approximation(name, n, value * (1 + 0.1 * seed), seed=seed) for n in lengths]
            records += [approximation(name, 1024, 2 * value, seed=seed, **small)]
    return pictures(tmp_path, records, ceilings=[roof()])


def test_every_figure_is_drawn_named_after_its_entry_and_legible(tmp_path):
    drawn = everything(tmp_path)
    for entry in FIGURES:
        own = [picture for picture in drawn if picture.question == entry.question]
        assert own, entry.name
        for picture in own:
            assert picture.name.startswith(f"{entry.name}-")
            assert picture.alt.startswith(f"{picture.title}. ")
    assert max(Counter(picture.name for picture in drawn).values()) == 1
    for picture in drawn:
        assert_legible(picture.figure)


def test_questions_are_questions_and_tell_figures_apart():
    questions = [entry.question for entry in FIGURES]
    assert len(set(questions)) == len(questions)
    assert all(question.endswith("?") for question in questions)


def test_marks_of_the_best_score_are_whole(tmp_path):
    drawn = pictures(tmp_path, [exchanged(name, seed, 1.0, error=0.5) for name in CLAIMS for seed in (0, 1)])
    assert any(picture.name.startswith("exchange") for picture in drawn)
    for picture in drawn:
        assert_whole_marks(picture.figure)
