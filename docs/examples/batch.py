"""Run requests as a batch job and print the answers. The prefix that the requests share is computed once."""

import json
import sys

from pensieve.client import Client

RULES = "You answer letters to a harbour office. Say in one sentence what the writer wants. " * 8
LETTERS = (
    "When does the ferry leave on Sundays?",
    "My boat needs a place.",
    "The crane is broken.",
)

with Client(*sys.argv[1:2]) as client:
    model = client.server_info().model
    lines = [
        {
            "custom_id": f"letter-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [
                    {"role": "system", "content": RULES},
                    {"role": "user", "content": letter},
                ],
                "max_tokens": 24,
            },
        }
        for number, letter in enumerate(LETTERS, 1)
    ]
    job = client.jobs.create("\n".join(map(json.dumps, lines)).encode(), name="letters")
    for seen in client.jobs.watch(job.job_id):
        print(f"{seen.state}: {seen.num_answered} of {seen.num_lines} lines")
        job = seen
    for text in client.jobs.results(job.job_id):
        answer = json.loads(text)
        reply = answer["response"]["body"]["choices"][0]["message"]["content"]
        print(f"{answer['custom_id']}: {reply}")
    print(f"{job.saved_tokens} of {job.prompt_tokens} prompt tokens came from the cache")
    client.jobs.delete(job.job_id)
