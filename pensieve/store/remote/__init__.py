"""One history for several daemons, without the wire between them (`pensieve.history` has that).

wire.py          how values of the store travel
methods.py       which of the store's methods are calls
calls.py         a call carried out where the history is: whose conversation, once, many in one commit
remote_store.py  `ConversationStore` as a daemon has it that shares the history
"""
