"""lm-evaluation-harness itself, offline, on local tasks: with our model, and beside Hugging Face's adapter."""

import json
import os
import warnings

import pytest

pytestmark = [pytest.mark.eval, pytest.mark.filterwarnings("ignore")]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

QUESTIONS = [
    ("What is 2 plus 3?", ["5", "seven", "a fox", "900"], 0),
    ("The opposite of hot is", ["cold", "warmer than", "Tuesday", "to"], 0),
    ("Sort 3, 1, 2:", ["3, 2, 1", "1, 2, 3", "2", "one"], 1),
    ("The sun is a", ["fish", "stone in the garden", "star", "verb"], 2),
    ("A", ["b", "c d e", "dog ran over the hill", "!"], 2),
]
TEXTS = [
    "In the beginning God created the heaven and the earth.",
    "A short one.",
    "The quick brown fox jumps over the lazy dog. " * 12,
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """One task for each kind of request, on JSONL files."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": q, "choices": c, "gold": g} for q, c, g in QUESTIONS]
    choice, text = folder / "choice.jsonl", folder / "text.jsonl"
    choice.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text.write_text("".join(json.dumps({"page": page}) + "\n" for page in TEXTS))

    def task(name, file, **options):
        return {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(file)},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            **options,
        }

    acc = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm")
    ]
    rolling = [
        {"metric": metric, "aggregation": how, "higher_is_better": False}
        for metric, how in (
            ("word_perplexity", "weighted_perplexity"),
            ("byte_perplexity", "weighted_perplexity"),
            ("bits_per_byte", "bits_per_byte"),
        )
    ]
    exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    return [
        task(
            "local_choice",
            choice,
            output_type="multiple_choice",
            doc_to_text="{{question}}",
            doc_to_choice="{{choices}}",
            doc_to_target="gold",
            metric_list=acc,
        ),
        task(
            "local_rolling",
            text,
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{page}}",
            metric_list=rolling,
        ),
        task(
            "local_generation",
            choice,
            output_type="generate_until",
            doc_to_text="{{question}}",
            doc_to_target="{{choices[gold]}}",
            generation_kwargs={"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
            metric_list=[exact],
        ),
    ]


def evaluate(model, tasks, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lm_eval
        from lm_eval.tasks import TaskManager

        import ninfer_jax.evaluation.lm_eval  # noqa: F401

        return lm_eval.simple_evaluate(
            model,
            tasks=tasks,
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
            batch_size=2,
            device="cpu",
            **options,
        )


def metrics(results):
    return {
        (task, name): value
        for task, values in results["results"].items()
        for name, value in values.items()
        if isinstance(value, float | int) and "stderr" not in name and name != "sample_len"
    }


def answers(results, task):
    return [s["resps"] for s in sorted(results["samples"][task], key=lambda s: s["doc_id"])]


def test_the_demo_model(tasks):
    results = evaluate("ninfer", tasks, model_args="pretrained=demo")
    found = metrics(results)
    assert {task for task, _ in found} == {"local_choice", "local_rolling", "local_generation"}
    assert 0 <= found["local_choice", "acc,none"] <= 1
    # A trained model: a good deal better than the 8 bits of a uniform byte.
    assert 0.5 < found["local_rolling", "bits_per_byte,none"] < 4
    assert all(isinstance(a[0][0], str) for a in answers(results, "local_generation"))


def test_a_chat_template(tasks):
    results = evaluate(
        "ninfer", tasks[:1], model_args={"pretrained": "demo"}, apply_chat_template=True
    )
    (sample, *_) = results["samples"]["local_choice"]
    assert "<|im_start|>user" in str(sample["arguments"])


def test_the_same_metrics_as_hugging_face(tasks, goldens):
    """On the tiny golden checkpoint; the last text is longer than the window, so it is rolled."""
    folder = str(goldens / "tiny-qwen3.5-dense")
    ours = evaluate("ninfer", tasks, model_args={"pretrained": folder, "max_length": 96})
    theirs = evaluate(
        "hf", tasks, model_args={"pretrained": folder, "max_length": 96, "dtype": "float32"}
    )
    mine, reference = metrics(ours), metrics(theirs)
    assert set(mine) == set(reference)
    for key, value in reference.items():
        assert mine[key] == pytest.approx(value, rel=1e-3), key
    for got, want in zip(
        answers(ours, "local_choice"), answers(theirs, "local_choice"), strict=True
    ):
        for (logprob, greedy), (expected, also) in zip(
            (a[0] for a in got), (a[0] for a in want), strict=True
        ):
            assert float(logprob) == pytest.approx(float(expected), abs=1e-3)
            assert greedy == also
    assert answers(ours, "local_generation") == answers(theirs, "local_generation")


def test_what_is_too_long_is_cut_from_the_left_and_counted(goldens, caplog):
    from types import SimpleNamespace

    from ninfer_jax.evaluation.lm_eval import NinferLM

    lm = NinferLM(str(goldens / "tiny-qwen3.5-dense"), max_length=64)
    ids = lm.tok_encode("The quick brown fox jumps over the lazy dog. " * 10)
    short, long = ids[:20], ids[:100]
    with caplog.at_level("WARNING", "ninfer_jax"):
        scored = lm._loglikelihood_tokens(
            [(None, short, ids[:3]), (None, long, ids[:3]), (None, short, long)], disable_tqdm=True
        )
    assert lm.truncated == 2
    assert "2 of 3 sequences are longer than max_length=64" in caplog.text
    (whole, cut, only) = lm.engine.score(
        [short, long[-62:], long[35:36]], [ids[:3], ids[:3], long[36:]]
    )
    assert [s for s, _ in scored[:2]] == [whole.sum_logprob, cut.sum_logprob]
    assert len(only.token_ids) == 64
    text = lm.engine.frontend.tokenizer.decode(long)
    request = SimpleNamespace(args=(text, {"until": ["\n"], "max_gen_toks": 4}))
    assert len(lm.generate_until([request], disable_tqdm=True)) == 1
    assert lm.truncated == 3
    lm.engine.close()
