/* The list of a process's mappings, read before the process is paused. */
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct areas {
	struct area {
		uint64_t start, end;
	} *all;
	size_t count;
};

/* Read that of the first process of the tree, which is about to be stopped. */
void read_mappings(void);

/* Give what was read before, where it is right, for the list in a folder of /proc: a descriptor. -1: read it now. */
int mappings_in(int folder);

/* Tell whether a process was found to have no memory that its twin lacks. */
int is_all_in_twin(pid_t pid);

/* Tell whether criu was given what was read before of a process. */
int were_given(pid_t pid);

/* Return the large areas of a process that no file is mapped to; what is not found is looked at like all else. */
struct areas anonymous_areas(pid_t pid);

/* Write down what criu was given, and what is right: the process is still paused. The files are closed. -1: it cannot be. */
int note_given(int into);
int note_paused(int into);
