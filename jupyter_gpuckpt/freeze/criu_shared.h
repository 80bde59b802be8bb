/* Little shared memory, which is copied beside what criu does: `begin` when all of a process's is known, and `end` before
 * any process goes on. */
void begin_with_shared(void);
void end_with_shared(void);
