// Records the writes of a process to the files of one folder, and its syncs. It is preloaded (LD_PRELOAD).
//
// Each successful call is appended to the file RECORDER_LOG: a byte for its kind (w: write, t: truncate, s: sync,
// u: unlink), a byte with the length of the file's name, two 64-bit numbers (w: offset and length, t: new length and 0,
// s: zeros), the name, and the written bytes. The recorder makes its own system calls directly, so it does not depend
// on the functions that it replaces.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

namespace {

// Returns the name of a file of the folder; empty for shared memory and for files elsewhere.
std::string name_in_folder(const std::string &path) {
    const char *folder = std::getenv("RECORDER_FOLDER");
    if (folder == nullptr) return "";
    const std::string start = std::string(folder) + "/";
    if (path.compare(0, start.size(), start) != 0) return "";
    const std::string name = path.substr(start.size());
    const bool is_shared_memory = name.size() > 4 && name.compare(name.size() - 4, 4, "-shm") == 0;
    return is_shared_memory ? "" : name;
}

std::string name_of(int file) {
    const std::string link = "/proc/self/fd/" + std::to_string(file);
    char target[4096];
    const ssize_t length = readlink(link.c_str(), target, sizeof target);
    return length <= 0 ? "" : name_in_folder(std::string(target, static_cast<size_t>(length)));
}

void record(char what, const std::string &name, uint64_t first, uint64_t second, const void *bytes) {
    static const long log = syscall(SYS_openat, AT_FDCWD, std::getenv("RECORDER_LOG"),
                                    O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    std::string line(1, what);
    line += static_cast<char>(name.size());
    line.append(reinterpret_cast<const char *>(&first), sizeof first);
    line.append(reinterpret_cast<const char *>(&second), sizeof second);
    line += name;
    if (bytes != nullptr) line.append(static_cast<const char *>(bytes), second);
    if (syscall(SYS_write, log, line.data(), line.size()) != static_cast<long>(line.size())) abort();
}

ssize_t written(int file, const void *bytes, uint64_t offset, ssize_t length) {
    if (length > 0)
        if (const std::string name = name_of(file); !name.empty())
            record('w', name, offset, static_cast<uint64_t>(length), bytes);
    return length;
}

int truncated(int file, off64_t length, long result) {
    if (result == 0)
        if (const std::string name = name_of(file); !name.empty())
            record('t', name, static_cast<uint64_t>(length), 0, nullptr);
    return static_cast<int>(result);
}

int synced(int file, long result) {
    if (result == 0)
        if (const std::string name = name_of(file); !name.empty()) record('s', name, 0, 0, nullptr);
    return static_cast<int>(result);
}

}  // namespace

extern "C" {

ssize_t write(int file, const void *bytes, size_t length) {
    const long offset = syscall(SYS_lseek, file, 0, SEEK_CUR);
    return written(file, bytes, static_cast<uint64_t>(offset), syscall(SYS_write, file, bytes, length));
}

int unlink(const char *path) {
    const long result = syscall(SYS_unlinkat, AT_FDCWD, path, 0);
    if (result == 0)
        if (const std::string name = name_in_folder(path); !name.empty())
            record('u', name, 0, 0, nullptr);
    return static_cast<int>(result);
}

ssize_t pwrite64(int file, const void *bytes, size_t length, off64_t offset) {
    return written(file, bytes, static_cast<uint64_t>(offset),
                   syscall(SYS_pwrite64, file, bytes, length, offset));
}

ssize_t pwrite(int file, const void *bytes, size_t length, off_t offset) {
    return pwrite64(file, bytes, length, offset);
}

int ftruncate64(int file, off64_t length) {
    return truncated(file, length, syscall(SYS_ftruncate, file, length));
}

int ftruncate(int file, off_t length) { return ftruncate64(file, length); }
int fsync(int file) { return synced(file, syscall(SYS_fsync, file)); }
int fdatasync(int file) { return synced(file, syscall(SYS_fdatasync, file)); }
}
