"""A coding agent of one file, which needs no package: tools that read and edit, a title, retries, and compaction when the context is full.

``TOY`` says what it does to its history: ``rewrites`` adds a default to each edit, ``forgets`` drops the first result.
"""

import json
import os
import sys
import urllib.error
import urllib.request

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {field: {} for field in fields}}}}
    for name, fields in (("read", ("path",)), ("edit", ("path", "old", "new")))
]


def ask(messages, tools=()):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **({"tools": tools} if tools else {})}
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    for attempt in range(3):
        again = {**headers, "x-stainless-retry-count": str(attempt)}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), again)
        try:
            return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            if error.code != 500:
                raise
    raise SystemExit("no answer")


def run(name, path, old="", new=""):
    with open(path) as file:
        text = file.read()
    if name == "edit":
        with open(path, "w") as file:
            file.write(text.replace(old, new))
    return text if name == "read" else "done"


def main(prompt):
    ask([{"role": "system", "content": "Write a title."}, {"role": "user", "content": prompt}])
    messages, mode = [{"role": "user", "content": prompt}], os.environ.get("TOY", "")
    while True:
        try:
            answer = ask(messages, TOOLS)
        except urllib.error.HTTPError:
            summary = ask([*messages[:3], {"role": "user", "content": "Write a summary."}])
            messages = [messages[0], {"role": "user", "content": summary["content"]}]
            continue
        messages.append(answer)
        if not answer.get("tool_calls"):
            return answer["content"]
        for call in answer["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            result = run(call["function"]["name"], **{name: arguments[name] for name in ("path", "old", "new") if name in arguments})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if mode == "rewrites" and "old" in arguments:
                call["function"]["arguments"] = json.dumps({**arguments, "all": False})
        if mode == "forgets" and len(messages) > 5:
            messages[2]["content"] = "forgotten"


print(main(sys.argv[1]))
