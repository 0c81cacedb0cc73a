"""Input lines, and outputs without what may differ between runs."""

import copy
import json


def chat(custom_id, text, system=None, **body):
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    return line(custom_id, "/v1/chat/completions", messages=messages, **body)


def completion(custom_id, prompt, **body):
    return line(custom_id, "/v1/completions", prompt=prompt, **body)


def score(custom_id, context, continuation):
    return line(custom_id, "/v1/score", context=context, continuation=continuation)


def line(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path, lines):
    """JSON values, or strings as they are."""
    texts = [x if isinstance(x, str) else json.dumps(x) for x in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def read(path):
    return [json.loads(x) for x in path.read_bytes().splitlines()]


def comparable(lines):
    """Lines by id, without the count of reused tokens: what a run must have in common with any other."""
    lines = copy.deepcopy(lines)
    for value in lines:
        if value["response"] and "usage" in value["response"]["body"]:
            del value["response"]["body"]["usage"]["prompt_tokens_details"]
    return sorted(lines, key=lambda value: value["id"])
