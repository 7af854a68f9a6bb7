"""Offer a tool to the model, and send the tool's result. The model's chat template must support tools."""

import json
import sys

from pensieve.client import Client, Delta
from pensieve.errors import InvalidArgument

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

with Client(*sys.argv[1:2]) as client:
    trip = client.conversation()
    try:
        trip.create(
            system_prompt="You help with journeys.", tools=[WEATHER], metadata={"user": "ada"}
        )
    except InvalidArgument as error:
        sys.exit(f"this model cannot be offered tools: {error}")
    called = []
    for piece in trip.send("Do I need a coat in Oslo?", max_tokens=100):
        print(piece, end="", flush=True)
        if isinstance(piece, Delta) and piece.kind == "tool_call":
            called.append(piece.text)
    print(f"\nthe model calls: {''.join(called) or 'nothing'}")
    # The tool's result is a message, and the model continues.
    found = json.dumps({"celsius": -4, "snow": True})
    print(trip.ask([{"role": "tool", "content": found, "tool_call_id": "call-1"}], max_tokens=100))
    print([message.role for message in trip.messages()])
