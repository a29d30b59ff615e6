// Counts what a process holds from malloc, at every moment and in all threads, and the most of it.
//
// Preloaded, it stands before the C library's functions of the same names, and calls them.
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic long held, most;

long held_bytes(void) { return held; }
long most_held_bytes(void) { return most; }
void forget_most_held(void) { most = held; }

static void *add(void *block) {
    if (!block) return block;
    const long size = (long)malloc_usable_size(block), now = atomic_fetch_add(&held, size) + size;
    for (long before = most; now > before && !atomic_compare_exchange_weak(&most, &before, now);) {
    }
    return block;
}

static void drop(void *block) {
    if (block) atomic_fetch_sub(&held, (long)malloc_usable_size(block));
}

void *malloc(size_t size) { return add(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return add(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return add(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *made = memalign(alignment, size);
    if (made) *block = made;
    return made ? 0 : ENOMEM;
}

void *realloc(void *block, size_t size) {
    drop(block);
    void *made = __libc_realloc(block, size);
    if (!made && size) add(block);  // it stays as it is
    return add(made);
}

void free(void *block) {
    drop(block);
    __libc_free(block);
}
