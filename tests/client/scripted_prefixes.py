"""The declared prefixes of the scripted daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from pensieve.v1 import conversation_pb2 as pb

PAGE_SIZE = 2


class FakePrefixes:
    """Stores declared prefixes. A message has one token per word."""

    declared: dict[str, pb.GetPrefixResponse]
    if TYPE_CHECKING:

        def _note(self, name: str, request: Any, context: grpc.ServicerContext) -> None: ...
        def _refuse(self, reason: str, context: grpc.ServicerContext) -> None: ...

    def CreatePrefix(
        self, request: pb.CreatePrefixRequest, context: grpc.ServicerContext
    ) -> pb.CreatePrefixResponse:
        self._note("CreatePrefix", request, context)
        if request.prefix_id in self.declared:
            self._refuse("ALREADY_EXISTS", context)
        system = pb.NewMessage(role=pb.ROLE_SYSTEM, content=request.system_prompt)
        given = [*([system] if system.content else []), *request.messages]
        messages = [
            pb.Message(
                index=index,
                role=each.role,
                content=each.content,
                num_tokens=len(each.content.split()),
            )
            for index, each in enumerate(given)
        ]
        prefix = pb.Prefix(
            prefix_id=request.prefix_id,
            num_messages=len(messages),
            num_tokens=sum(each.num_tokens for each in messages),
            keep_warm=request.keep_warm,
        )
        self.declared[request.prefix_id] = pb.GetPrefixResponse(
            prefix=prefix,
            messages=messages,
            tools=request.tools,
            template_options=request.template_options,
        )
        return pb.CreatePrefixResponse(prefix=prefix)

    def GetPrefix(
        self, request: pb.GetPrefixRequest, context: grpc.ServicerContext
    ) -> pb.GetPrefixResponse:
        self._note("GetPrefix", request, context)
        return self._declared(request.prefix_id, context)

    def ListPrefixes(
        self, request: pb.ListPrefixesRequest, context: grpc.ServicerContext
    ) -> pb.ListPrefixesResponse:
        self._note("ListPrefixes", request, context)
        start = int(request.page_token or 0)
        end = start + PAGE_SIZE
        prefixes = [each.prefix for each in self.declared.values()]
        return pb.ListPrefixesResponse(
            prefixes=prefixes[start:end],
            next_page_token=str(end) if end < len(prefixes) else "",
        )

    def DeletePrefix(
        self, request: pb.DeletePrefixRequest, context: grpc.ServicerContext
    ) -> pb.DeletePrefixResponse:
        self._note("DeletePrefix", request, context)
        self._declared(request.prefix_id, context)
        del self.declared[request.prefix_id]
        return pb.DeletePrefixResponse()

    def _declared(self, prefix_id: str, context: grpc.ServicerContext) -> pb.GetPrefixResponse:
        if prefix_id not in self.declared:
            self._refuse("NOT_FOUND", context)
        return self.declared[prefix_id]
