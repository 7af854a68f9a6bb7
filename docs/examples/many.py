"""Run eight conversations at the same time with asyncio. The server computes their turns in one batch."""

import asyncio
import sys

from pensieve.client import AsyncClient, AsyncConversation

NAMES = ("Ada", "Grace", "Alan", "Frances", "Barbara", "Donald", "Radia", "Ken")


async def talk(conversation: AsyncConversation, name: str) -> str:
    await conversation.ask(f"My name is {name}.", max_tokens=40)
    text = ""
    async for piece in conversation.send("What is my name?", max_tokens=40):
        text += piece.text
    return text


async def main() -> None:
    async with AsyncClient(*sys.argv[1:2], timeout=120) as client:
        talks = [talk(client.conversation(), name) for name in NAMES]
        for name, text in zip(NAMES, await asyncio.gather(*talks), strict=True):
            print(f"{name}: {text}")


asyncio.run(main())
