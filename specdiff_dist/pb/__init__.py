"""Code generated from protos/specdiff/v1, committed so that an installation needs no compiler. Regenerate with

python -m grpc_tools.protoc -I specdiff_dist/pb=protos/specdiff/v1 --python_out=. --pyi_out=. specdiff_dist/pb/roles.proto

`-I virtual=disk` makes protoc see the file where its Python module lives, so generated imports need no repair.
"""
