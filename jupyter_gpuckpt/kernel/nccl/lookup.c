/* For programs that open NCCL themselves (dlopen) and look its functions up in it: dlsym, which they find here first.
 *
 * Where they find a function of the NCCL that front.c leads to, they are given the one in front of it. Every other call
 * goes on to the next dlsym, which is the C library's, or that of another library which is loaded first as well. It is
 * jumped to, as it looks at where it was called from (RTLD_NEXT, RTLD_DEFAULT). On other processors than these, such
 * programs pass by.
 */
#define _GNU_SOURCE
#include "communicators.h"

#include <dlfcn.h>
#include <string.h>

#if defined __GLIBC__ && defined __x86_64__ && defined __LP64__
#define FIRST_VERSION "GLIBC_2.2.5" /* of the C library on this processor: every later one has it, too */
#elif defined __GLIBC__ && defined __aarch64__ && defined __LP64__
#define FIRST_VERSION "GLIBC_2.17"
#endif

#ifdef FIRST_VERSION

/* Return the dlsym that is behind this one. It is looked for at the first call, which may be before any beginning here. */
lookup *next_lookup(void) {
  static lookup *next;
  if (!next) {
    lookup *of_libc = (lookup *)dlvsym(RTLD_NEXT, "dlsym", FIRST_VERSION); /* others' have no version */
    next = (lookup *)of_libc(RTLD_NEXT, "dlsym");
  }
  return next;
}

static void *find_in_front(void *handle, const char *name) {
  void *own = function_in_front(name), *real = own ? loaded_function(name) : NULL;
  void *found = next_lookup()(handle, name); /* last: the program may ask dlerror how it went */
  return found && found == real && !is_newer() ? own : found;
}

/* Return where a call of dlsym is to go on. */
__attribute__((used)) static lookup *way_of(void *handle, const char *name) {
  if (handle == RTLD_DEFAULT || handle == RTLD_NEXT) return next_lookup(); /* finds what is loaded first, as the linker */
  return strncmp(name, "nccl", 4) && strncmp(name, "pnccl", 5) ? next_lookup() : find_in_front;
}

#ifdef __x86_64__
__asm__(
    ".text\n"
    ".globl dlsym\n"
    ".type dlsym, @function\n"
    "dlsym:\n"
    "  .cfi_startproc\n"
    "  endbr64\n"
    "  push %rdi\n"
    "  push %rsi\n"
    "  sub $8, %rsp\n"
    "  .cfi_adjust_cfa_offset 24\n"
    "  call way_of\n"
    "  add $8, %rsp\n"
    "  pop %rsi\n"
    "  pop %rdi\n"
    "  .cfi_adjust_cfa_offset -24\n"
    "  jmp *%rax\n"
    "  .cfi_endproc\n"
    ".size dlsym, . - dlsym\n");
#else
__asm__(
    ".text\n"
    ".globl dlsym\n"
    ".type dlsym, %function\n"
    "dlsym:\n"
    "  .cfi_startproc\n"
    "  hint 34\n" /* bti c */
    "  stp x0, x1, [sp, -32]!\n"
    "  str x30, [sp, 16]\n"
    "  .cfi_adjust_cfa_offset 32\n"
    "  .cfi_rel_offset x30, 16\n"
    "  bl way_of\n"
    "  mov x16, x0\n"
    "  ldr x30, [sp, 16]\n"
    "  ldp x0, x1, [sp], 32\n"
    "  .cfi_adjust_cfa_offset -32\n"
    "  .cfi_restore x30\n"
    "  br x16\n"
    "  .cfi_endproc\n"
    ".size dlsym, . - dlsym\n");
#endif

#else
lookup *next_lookup(void) { return dlsym; }
#endif
