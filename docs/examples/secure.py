"""Connect over TLS with a token from the environment. The token is never printed.

pensieve token --tenant acme --file tokens.toml
pensieve serve --token-file tokens.toml --address 0.0.0.0:50051 --tls-cert chain.pem --tls-key key.pem
PENSIEVE_TOKEN=... PENSIEVE_TLS_CA=ca.pem python secure.py chat.example:50051
"""

import os
import sys

from pensieve.client import Client
from pensieve.errors import Unauthenticated

address = sys.argv[1] if sys.argv[1:] else "localhost:50051"
tls = os.environ.get("PENSIEVE_TLS_CA", True)  # a CA file, or True for the system's CAs

with Client(address, token=os.environ.get("PENSIEVE_TOKEN"), tls=tls) as client:
    print(client)
    try:
        print(client.conversation().ask("Who may talk to you?", max_tokens=40))
    except Unauthenticated as error:
        sys.exit(f"PENSIEVE_TOKEN: {error}")
