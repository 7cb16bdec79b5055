"""How calls reach a role: in this process (local.py), over gRPC (grpc_server.py, grpc_client.py) or over Serve handles
(handle_messages.py, handle_client.py), with equal meaning.

engine_thread   the one thread an engine runs in
checks          what a call or a reply must satisfy, whatever carried it
local           roles over engines in this process
role_service    one engine behind named methods that take and give bytes: the replica's side of both transports
remote_roles    the caller's side of both
error_detail    our errors <-> what a failed call carries
codec           types <-> protobuf bytes, exact
grpc_options    channel and server settings, with their reasons
grpc_errors     our errors <-> gRPC statuses
grpc_server     one engine behind a port
channel_pool    one channel per address
grpc_client     roles over a gRPC channel
handle_messages replies to handle calls, as msgpack
handle_client   roles over handle calls; the one file here that knows Ray
envelope        dataclasses <-> msgpack, for what crosses Serve handles
"""
