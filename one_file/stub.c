/* The front of the one file: unpacks what is appended to it into the user's cache, once, and becomes the Python there.

   It needs nothing of the machine but the kernel and /proc: no shell, no program, no library. What follows it in the
   file is a tar archive, compressed with zstd, and a trailer that says where that begins (`pack.py` writes both).

   <cache>/gpuinfer/one-file/NAME         unpacked; NAME is version and digest, so that no two contents share a folder
   <cache>/gpuinfer/one-file/NAME.lock    shared by all who run from the folder; exclusive to who unpacks or removes it
   <cache>/gpuinfer/one-file/NAME.part    half unpacked. It gets its name when it is whole, and on the disk
*/

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <zstd.h>

enum { FAILED = 1, UNUSABLE = 2 }; /* the command's exit codes: the work failed; bad settings */

enum {
    LOOK_US = 50 * 1000,
    LOOKS = 12000, /* ten minutes of waiting for another start. In looks: who was suspended loses no time */
    SILENT = 20,   /* looks before we say so */
    BLOCK = 512,   /* of tar */
    OUT = 1 << 20, /* a multiple of it, so that no header is cut */
    IN = 1 << 17,
};

#define CURE "Set XDG_CACHE_HOME to a folder of yours"
#define DAMAGED "this file is damaged or was not copied whole. Copy it again."

struct trailer { /* the last bytes of the file, little-endian; `pack.py` knows the same */
    char magic[16];
    char name[96];         /* of the folder */
    char python[64];       /* the interpreter in it */
    char loader[64];       /* the dynamic loader of the system that the interpreter asks for */
    uint64_t offset, size; /* of the archive in this file, bytes */
    uint64_t needed;       /* on the disk once unpacked, bytes */
    uint32_t glibc[2];     /* the oldest that everything inside runs with */
};
static const char MAGIC[16] = "gpuinfer.onefile";

static volatile sig_atomic_t stopped; /* the number of a signal that ends us */

static void stop(int number) { stopped = number; }

static _Noreturn void fail(int code, const char *form, ...) {
    va_list words;
    va_start(words, form);
    fputs("gpuinfer: ", stderr);
    vfprintf(stderr, form, words);
    fputc('\n', stderr);
    exit(code);
}

static char *joined(const char *form, ...) {
    char *made;
    va_list words;
    va_start(words, form);
    if (vasprintf(&made, form, words) < 0)
        fail(FAILED, "no memory is left. Free some.");
    va_end(words);
    return made;
}

static struct trailer read_trailer(int self) {
    struct trailer found;
    off_t end = lseek(self, 0, SEEK_END), at = end - (off_t)sizeof found;
    if (at < 0 || pread(self, &found, sizeof found, at) != sizeof found || memcmp(found.magic, MAGIC, sizeof MAGIC) ||
        found.offset + found.size != (uint64_t)at)
        fail(FAILED, DAMAGED);
    return found;
}

/* ---- the machine */

/* The version of the C library here, as its file states it; 0 where that is not found, and then nobody is refused. */
static unsigned glibc_here(void) {
    static const char *const places[] = {"/lib/x86_64-linux-gnu/libc.so.6", "/lib/aarch64-linux-gnu/libc.so.6",
                                         "/lib64/libc.so.6", "/usr/lib64/libc.so.6", "/usr/lib/libc.so.6", NULL};
    static const char banner[] = "GNU C Library";
    for (const char *const *place = places; *place; place++) {
        int file = open(*place, O_RDONLY | O_CLOEXEC);
        struct stat status;
        if (file < 0)
            continue;
        unsigned major = 0, minor = 0;
        if (!fstat(file, &status) && status.st_size > 0) {
            char *bytes = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
            if (bytes != MAP_FAILED) {
                char *said = memmem(bytes, status.st_size, banner, strlen(banner)), line[128] = "";
                if (said)
                    memcpy(line, said, (size_t)(bytes + status.st_size - said) < 127 ? bytes + status.st_size - said : 127);
                char *version = strstr(line, "version ");
                if (version)
                    sscanf(version, "version %u.%u", &major, &minor);
                munmap(bytes, status.st_size);
            }
        }
        close(file);
        if (major)
            return major * 1000 + minor;
    }
    return 0;
}

static void check_machine(const struct trailer *our) {
    if (access(our->loader, X_OK))
        fail(FAILED, "this machine has no %s, the loader of the GNU C library. Run it on a Linux with glibc %u.%u or newer.",
             our->loader, our->glibc[0], our->glibc[1]);
    unsigned here = glibc_here();
    if (here && here < our->glibc[0] * 1000 + our->glibc[1])
        fail(FAILED,
             "this machine has glibc %u.%u, and this file was built for %u.%u or newer. Build it on a system as old as the"
             " oldest that it is for, or use the wheel.",
             here / 1000, here % 1000, our->glibc[0], our->glibc[1]);
}

/* ---- the cache */

static char *cache_root(void) {
    const char *set = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (set && set[0] == '/')
        return joined("%s", set);
    if (home && home[0] == '/')
        return joined("%s/.cache", home);
    fail(UNUSABLE, "neither HOME nor XDG_CACHE_HOME names a folder, and it must unpack itself somewhere. " CURE ".");
}

static int above_failed; /* why the first of the folders above could not be made */

/* Make a folder if need be. Its content is run as it is found: it must be ours, and nobody else may write there. */
static void make_ours(const char *folder) {
    struct stat target, link;
    if (mkdir(folder, 0700) && errno != EEXIST) {
        int why = errno == ENOENT && above_failed ? above_failed : errno;
        fail(why == ENOSPC || why == EDQUOT ? FAILED : UNUSABLE, "%s cannot be made: %s. " CURE ".", folder, strerror(why));
    }
    if (stat(folder, &target) || lstat(folder, &link))
        fail(UNUSABLE, "%s cannot be looked at: %s. " CURE ".", folder, strerror(errno));
    if (!S_ISDIR(target.st_mode))
        fail(UNUSABLE, "%s is no folder. Remove it, or set XDG_CACHE_HOME to another folder.", folder);
    if (target.st_uid != geteuid() || link.st_uid != geteuid())
        fail(UNUSABLE, "%s belongs to user %u, and what lies there would be run as yours. " CURE ".", folder,
             target.st_uid != geteuid() ? target.st_uid : link.st_uid);
    if (target.st_mode & 022)
        fail(UNUSABLE, "others may write in %s, and what lies there would be run as yours. chmod go-w it, or set"
             " XDG_CACHE_HOME to another folder.", folder);
}

/* The folders above the cache are only made, not judged: HOME may lie anywhere. */
static void make_one_above(const char *folder) {
    if (mkdir(folder, 0700) && errno != EEXIST && !above_failed)
        above_failed = errno; /* it shows at the last one, which cannot be made then */
}

static void make_above(char *folder) {
    for (char *slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        make_one_above(folder);
        *slash = '/';
    }
    make_one_above(folder);
}

static int remove_one(const char *at, const struct stat *status, int kind, struct FTW *where) {
    (void)status, (void)kind, (void)where;
    return remove(at);
}

static void remove_all(const char *folder) { nftw(folder, remove_one, 32, FTW_DEPTH | FTW_PHYS); }

/* ---- the archive */

struct source {
    int file;
    uint64_t at, left;
    ZSTD_DStream *zstd;
    ZSTD_inBuffer in;
    unsigned char *raw, *out;
    size_t have, taken;
    bool ended; /* the last frame was whole, its checksum too */
};

static const char *const damaged = DAMAGED;

/* More of the archive into `out`. NULL, or what is wrong. */
static const char *refill(struct source *from) {
    ZSTD_outBuffer out = {from->out, OUT, 0};
    while (out.pos < out.size && !from->ended) {
        if (stopped)
            return "stopped";
        if (from->in.pos == from->in.size) {
            ssize_t got = pread(from->file, from->raw, from->left < IN ? from->left : IN, from->at);
            if (got <= 0)
                return damaged;
            from->at += got, from->left -= got;
            from->in = (ZSTD_inBuffer){from->raw, got, 0};
        }
        size_t state = ZSTD_decompressStream(from->zstd, &out, &from->in);
        if (ZSTD_isError(state))
            return damaged;
        from->ended = state == 0;
    }
    from->have = out.pos, from->taken = 0;
    return NULL;
}

/* Up to `wanted` next bytes, and how many. */
static const char *next(struct source *from, size_t wanted, unsigned char **bytes, size_t *count) {
    if (from->taken == from->have) {
        const char *wrong = refill(from);
        if (wrong)
            return wrong;
        if (!from->have)
            return damaged;
    }
    *bytes = from->out + from->taken;
    *count = from->have - from->taken < wanted ? from->have - from->taken : wanted;
    from->taken += *count;
    return NULL;
}

static uint64_t octal(const unsigned char *field, size_t length) {
    char text[16] = "";
    memcpy(text, field, length);
    return strtoull(text, NULL, 8);
}

static const char *unpack_file(struct source *from, int folder, const char *name, const unsigned char *header) {
    uint64_t left = octal(header + 124, 12), padded = (left + BLOCK - 1) / BLOCK * BLOCK;
    int file = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, octal(header + 100, 8) & 0700);
    if (file < 0)
        return strerror(errno);
    const char *wrong = NULL;
    while (padded && !wrong) {
        unsigned char *bytes;
        size_t count;
        if ((wrong = next(from, padded, &bytes, &count)))
            break;
        padded -= count;
        for (size_t use = count < left ? count : left; use && !wrong;) {
            ssize_t done = write(file, bytes, use);
            if (done < 0 && errno != EINTR)
                wrong = strerror(errno);
            else if (done > 0)
                bytes += done, use -= done, left -= done;
        }
    }
    /* Numba knows a kernel's source by its time: the same after each unpacking */
    struct timespec times[2] = {{octal(header + 136, 12), 0}, {octal(header + 136, 12), 0}};
    if (!wrong && futimens(file, times))
        wrong = strerror(errno);
    if (close(file) && !wrong)
        wrong = strerror(errno); /* a quota may be noticed here */
    return wrong;
}

static const char *unpack_all(struct source *from, int folder) {
    for (;;) {
        unsigned char *bytes, header[BLOCK];
        size_t count;
        const char *wrong = next(from, BLOCK, &bytes, &count);
        if (wrong)
            return wrong;
        if (count != BLOCK)
            return damaged;
        memcpy(header, bytes, BLOCK);
        if (!header[0])
            break; /* the end mark */
        char name[512], link[101];
        snprintf(name, sizeof name, header[345] ? "%.155s/%.100s" : "%.0s%.100s", (char *)header + 345, (char *)header);
        snprintf(link, sizeof link, "%.100s", (char *)header + 157);
        if (header[156] == '5')
            wrong = mkdirat(folder, name, 0700) ? strerror(errno) : NULL;
        else if (header[156] == '2')
            wrong = symlinkat(link, folder, name) ? strerror(errno) : NULL;
        else
            wrong = unpack_file(from, folder, name, header);
        if (wrong)
            return wrong;
    }
    while (!from->ended) { /* to the checksum */
        const char *wrong = refill(from);
        if (wrong)
            return wrong;
    }
    return NULL;
}

static const char *unpack_into(int self, const struct trailer *our, const char *part) {
    if (mkdir(part, 0700))
        return strerror(errno);
    int folder = open(part, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder < 0)
        return strerror(errno);
    struct source from = {.file = self, .at = our->offset, .left = our->size, .zstd = ZSTD_createDStream()};
    from.raw = malloc(IN), from.out = malloc(OUT);
    if (!from.zstd || !from.raw || !from.out)
        return "no memory is left";
    ZSTD_DCtx_setParameter(from.zstd, ZSTD_d_windowLogMax, 31);
    const char *wrong = unpack_all(&from, folder);
    if (!wrong && syncfs(folder)) /* the name must not reach the disk before the content */
        wrong = strerror(errno);
    ZSTD_freeDStream(from.zstd);
    free(from.raw), free(from.out), close(folder);
    return wrong;
}

static void listen_for_end(void (*handler)(int)) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        struct sigaction before, after = {.sa_handler = handler};
        if (!sigaction(signals[i], NULL, &before) && before.sa_handler != SIG_IGN)
            sigaction(signals[i], &after, NULL);
    }
}

/* Unpack to `folder` by way of `part`, or leave nothing and end. */
static void unpack(int self, const struct trailer *our, const char *folder, const char *part) {
    struct statvfs disk;
    char *above = joined("%.*s", (int)(strrchr(folder, '/') - folder), folder);
    remove_all(part); /* of one who was killed: nobody else can be at work here */
    if (!statvfs(above, &disk) && (uint64_t)disk.f_bavail * disk.f_frsize < our->needed)
        fail(FAILED, "it needs %llu MB in %s, and %llu MB are free. Free some, or set XDG_CACHE_HOME to a folder with more.",
             (unsigned long long)our->needed / 1000000, above,
             (unsigned long long)disk.f_bavail * disk.f_frsize / 1000000);
    fprintf(stderr, "gpuinfer: unpacking %llu MB into %s, this once\n", (unsigned long long)our->needed / 1000000, folder);
    listen_for_end(stop);
    const char *wrong = unpack_into(self, our, part);
    if (!wrong && rename(part, folder) && errno != EEXIST && errno != ENOTEMPTY)
        wrong = strerror(errno);
    if (access(part, F_OK) == 0)
        remove_all(part); /* what failed; or another did the same where files cannot be locked */
    listen_for_end(SIG_DFL);
    if (stopped)
        raise(stopped);
    if (wrong == damaged)
        fail(FAILED, "%s", damaged);
    if (wrong)
        fail(FAILED, "it cannot unpack into %s: %s. Nothing is left there. Free some space, or set XDG_CACHE_HOME to another"
             " folder.", above, wrong);
    free(above);
}

/* ---- who may be at it */

/* Whether the lock was had; false where the file system knows none. Waits for whoever has it, not for ever. */
static bool lock(int file, int kind, const char *folder) {
    for (int look = 0; look < LOOKS; look++) {
        if (!flock(file, kind | LOCK_NB))
            return true;
        if (errno != EWOULDBLOCK && errno != EINTR)
            return false;
        if (look == SILENT)
            fprintf(stderr, "gpuinfer: another start is unpacking into %s; waiting for it\n", folder);
        usleep(LOOK_US);
    }
    fail(FAILED, "another start has been at %s for ten minutes. End it: whoever holds %s.lock.", folder, folder);
}

static bool still_there(int file, const char *at) {
    struct stat held, now;
    return !fstat(file, &held) && !lstat(at, &now) && held.st_ino == now.st_ino && held.st_dev == now.st_dev;
}

/* The folder is there when this returns, and nobody removes it while the descriptor is open, which the Python inherits. */
static void have(int self, const struct trailer *our, const char *folder) {
    char *at = joined("%s.lock", folder), *part = joined("%s.part", folder);
    for (int turn = 0; turn < 100; turn++) {
        int file = open(at, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
        if (file < 0)
            fail(errno == ENOSPC || errno == EDQUOT ? FAILED : UNUSABLE, "%s cannot be opened: %s. " CURE ".", at, strerror(errno));
        bool locked = lock(file, LOCK_SH, folder);
        if (!still_there(file, at)) { /* who removed the folder has removed the lock too */
            close(file);
            continue;
        }
        if (!access(folder, F_OK)) {
            make_ours(folder);
            futimens(file, NULL); /* when it was used last */
            return;
        }
        if (!locked) {
            uint32_t number;
            if (getrandom(&number, sizeof number, 0) != sizeof number)
                fail(FAILED, "no random numbers are to be had: %s. Try again.", strerror(errno));
            part = joined("%s.%08x.part", folder, number);
            unpack(self, our, folder, part);
        } else if (lock(file, LOCK_EX, folder) && still_there(file, at) && access(folder, F_OK)) {
            unpack(self, our, folder, part);
        }
        close(file); /* and from the start: between two kinds of lock somebody else may have had it */
    }
    fail(FAILED, "%s is removed as fast as it is unpacked. See who does.", folder);
}

/* ---- the Python */

int main(int count, char **words) {
    static char self_path[PATH_MAX];
    int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    if (self < 0 || readlink("/proc/self/exe", self_path, sizeof self_path - 1) < 0)
        fail(FAILED, "it cannot read itself: /proc/self/exe: %s. Mount /proc.", strerror(errno));
    struct trailer our = read_trailer(self);
    check_machine(&our);

    mode_t before = umask(077);
    char *root = cache_root(), *ours = joined("%s/gpuinfer", root), *kept = joined("%s/one-file", ours);
    char *folder = joined("%s/%s", kept, our.name), *python = joined("%s/%s", folder, our.python);
    make_above(root);
    make_ours(ours);
    make_ours(kept);
    have(self, &our, folder);
    umask(before);

    static const char *const foreign[] = {"PYTHONHOME", "PYTHONPATH", "PYTHONPLATLIBDIR", "PYTHONSTARTUP", "PYTHONUSERBASE"};
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        unsetenv(foreign[i]); /* of another Python, whose modules would break this one */
    setenv("PYTHONNOUSERSITE", "1", 1);
    setenv("GPUINFER_ONE_FILE", self_path, 1);
    char **told = calloc(count + 2, sizeof *told);
    if (!told)
        fail(FAILED, "no memory is left. Free some.");
    told[0] = python;
    told[1] = joined("%s/bin/gpuinfer", folder);
    for (int i = 1; i < count; i++)
        told[i + 1] = words[i];
    execv(python, told);
    if (errno == ENOENT)
        fail(FAILED, "%s is not whole any more. Remove that folder and start again: it is unpacked anew.", folder);
    fail(UNUSABLE, "%s cannot be run: %s. If that is a file system without programs (noexec), set XDG_CACHE_HOME to a folder"
         " on another.", python, strerror(errno));
}
