"""Ask Trine with nothing but a NATS client and JSON. No Trine code is used here, so any language can do the same.

python examples/plain_nats.py "What is the capital of France?"
"""

import argparse
import asyncio
import json
import uuid

import nats


async def ask(url: str, model: str, text: str) -> None:
    connection = await nats.connect(url)
    request_id = uuid.uuid4().hex

    # 1. Listen first, so that no event is missed. Ids go into subjects as they are while they use only A-Za-z0-9_-
    events = await connection.subscribe(f"trine.{model}.tok.{request_id}")

    # 2. Put the request into the queue. The answer to the publish says whether the queue took it.
    request = {
        "id": request_id,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0.0,
        "max_tokens": 100,
        "deadline_ms": 60000,
    }
    await connection.jetstream().publish(f"trine.{model}.req.normal", json.dumps(request).encode())

    # 3. Print tokens until the last event. `index` counts tokens: an event that was seen before is passed over.
    seen = 0
    while True:
        event = json.loads((await events.next_msg(timeout=60)).data)
        if event["type"] == "tokens" and event["index"] == seen:
            print(event["text"], end="", flush=True)
            seen += len(event["token_ids"])
        elif event["type"] == "finished":
            print(
                f"\n({event['reason']}; {event['usage']['completion_tokens']} tokens by {event['served_by']['decode']})"
            )
            break
        elif event["type"] == "failed":
            raise SystemExit(f"{event['code']}: {event['message']}")
    await connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ask a model on NATS.")
    parser.add_argument("text")
    parser.add_argument("--nats", default="nats://127.0.0.1:4222")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    arguments = parser.parse_args()
    asyncio.run(ask(arguments.nats, arguments.model, arguments.text))
