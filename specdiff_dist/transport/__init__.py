"""How calls reach a role: in this process (local.py) or over gRPC (grpc_server.py, grpc_client.py), with equal meaning.

engine_thread   the one thread an engine runs in
checks          what a call or a reply must satisfy, whatever carried it
local           roles over engines in this process
codec           types <-> protobuf bytes, exact
grpc_options    channel and server settings, with their reasons
grpc_errors     our errors <-> gRPC statuses
grpc_server     one engine behind a port
channel_pool    one channel per address
grpc_client     roles over a channel
envelope        dataclasses <-> msgpack, for what crosses Serve handles
"""
