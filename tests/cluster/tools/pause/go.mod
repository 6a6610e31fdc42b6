module perdure.dev/tests/cluster/tools/pause

go 1.26.0
