"""Who is calling and what they may take: tokens, limits, the audit log, error mapping. No gRPC, no HTTP."""
