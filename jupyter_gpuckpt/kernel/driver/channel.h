/* How the keeper reaches a library of ours in any process of a kernel's or job's tree, Python or not. */
#pragma once
#include <stddef.h>

/* A conversation with the keeper, through two FIFOs in the run folder. */
typedef struct channel { int in, out; } channel;

enum { CALLED = 62 }; /* the signal (freeze/parking_channel.py) */

/* Be there for the keeper from now on, in this process: a thread, named gpuckpt-NAME, waits for a signal of its own and
 * then has a conversation. A thread of another process that sends it with its number gets an `answer`. The FIFOs are NAME-PID-to and NAME-PID-from. Between two conversations, `idle` is called
 * until it returns 0. Does nothing where no keeper can come, or this process has the thread already. */
void be_there(const char *name, void (*converse)(channel *), int (*idle)(void), void (*answer)(int thread));

/* Where the keeper puts files for this process; NULL where there is no keeper. */
const char *run_folder(void);

/* Open the FIFO NAME-PID-END of this process, where the keeper has made it; -1 where it cannot be. */
int open_fifo(const char *end, int flags);

void say(channel *to, const char *text, ...) __attribute__((format(printf, 2, 3)));

/* Read a line of at most `size` - 1 bytes, in so many seconds (0: however long it takes); empty where none comes. */
void hear(channel *from, char *line, size_t size, int seconds);
