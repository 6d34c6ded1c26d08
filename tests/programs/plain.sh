#!/bin/sh
# Any program at all: says which task it is and ends.
echo "pod $POD_NAME"
echo "task $PACELINE_TASK"
