#!/bin/sh
# criu runs this at every stage of a dump. At this one the dump is done and the kernel still frozen: what lies in its
# /dev/shm belongs to the same instant as its memory.
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0
archive="$GPUCKPT_SNAPSHOT/shm.tar"
"${0%/*}/gpuckpt-shm-packer" "$archive" /dev/shm gpuckpt gpuckpt-criu gpuckpt-staging gpuckpt-vram ||
    tar -c --sparse -b 256 -f "$archive" --one-file-system -C /dev/shm \
        --exclude=./gpuckpt --exclude=./gpuckpt-criu --exclude=./gpuckpt-staging --exclude=./gpuckpt-vram . || exit
cp "$GPUCKPT_LOG" "$GPUCKPT_SNAPSHOT/kernel.log" || exit
# Nothing is missing but memory that is copied later (criu_memory.c).
[ -z "$GPUCKPT_DUMP_TWINS_FOLDER" ] || : > "$GPUCKPT_DUMP_TWINS_FOLDER/saved"
