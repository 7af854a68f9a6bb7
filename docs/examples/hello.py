"""Ask one question and print the answer."""

import sys

from pensieve.client import Client

with Client(*sys.argv[1:2]) as client:  # default address: 127.0.0.1:50051
    print(client.conversation().ask("Hello there.").text)
