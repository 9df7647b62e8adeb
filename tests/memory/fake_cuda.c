/* Stands for libcuda.so.1, of two GPUs: the calls that nvx makes of it, over host memory. It is as strict as the real one
 * where nvx could go wrong: what needs a current context fails without one, and a flag or a type that is not the one
 * that is meant fails too. Compiled as C++, though its names do not follow the style. */

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

extern "C" {

enum { kDone = 0, kInvalid = 1, kNoMemory = 2, kNoContext = 201, kAlready = 704, kNotReady = 600 };
enum { kDevices = 2, kPosixFd = 1, kFabric = 8 };

struct location { int type, id; };
struct properties {
  int type, handle_types;
  struct location where;
  void* metadata;
  unsigned char compression, rdma_capable, rest[6];
};
struct access { struct location where; int flags; };
struct handle { char bytes[64]; };

static thread_local long stack[8];
static thread_local int depth = 0;
static int retained = 0;
static int peers = 0;
static int polls = 0;

/* For the test: how many contexts this thread has current, and how often one was retained. */
int fake_depth(void) { return depth; }
int fake_retained(void) { return retained; }

/* For the test: the one call that is refused; none by "". */
static char refused[64];
int fake_refuse(const char* call) { return snprintf(refused, sizeof refused, "%s", call); }
static int refuses(const char* call) { return strcmp(refused, call) == 0; }

/* For the test: how much memory was created that network cards can access. */
static int for_rdma = 0;
int fake_for_rdma(void) { return for_rdma; }

/* With FAKE_FABRIC set, memory has fabric handles too. All processes of this machine are in the fabric. */
static int shares_by(int types) { return types == kPosixFd || (types == kFabric && getenv("FAKE_FABRIC")); }

static int need(void) { return depth > 0 ? kDone : kNoContext; }

/* For the test: whether cuInit returns. */
static volatile int held = 0;
int fake_hold(void) { held = 1; return 0; }
int fake_release(void) { held = 0; return 0; }
int cuInit(unsigned flags) {
  while (held) usleep(1000);
  return flags;
}
int cuGetErrorName(int error, const char** name) { return *name = error == kInvalid ? "FAKE_INVALID" : 0, *name ? 0 : 1; }
int cuGetErrorString(int error, const char** text) { return *text = error ? "as a test wants it" : "", 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, kDone; }
int cuDeviceGetCount(int* count) { return *count = kDevices, kDone; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal + 10, ordinal < kDevices ? kDone : kInvalid; }
int cuDeviceGetName(char* name, int bytes, int device) { return snprintf(name, bytes, "Fake %d", device) < 0; }
int cuDeviceGetUuid_v2(char* uuid, int device) { return memset(uuid, device, 16), kDone; }
int cuDeviceGetPCIBusId(char* id, int bytes, int device) { return snprintf(id, bytes, "0000:%02X:00.0", device) < 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = size_t(device) << 30, kDone; }
/* For the test: whether the first GPU can multicast. */
static int multicasts = 0;
int fake_let_multicast(void) { return multicasts = 1; }
/* For the test: whether the GPUs use the CPU's page tables. */
static int c2c = 0;
int fake_turn_c2c(void) { return c2c = !c2c; }
/* Of the two GPUs, network cards can access the first one's virtual memory only. */
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (attribute == 75) return *value = 9, kDone;
  if (attribute == 100) return *value = c2c, kDone;
  if (attribute == 118) return *value = device == 10 ? 100 : 0, kDone;
  if (attribute == 132) return *value = multicasts && device == 10, kDone;
  if (attribute == 110) return *value = device == 10, kDone;
  if (attribute == 128 && getenv("FAKE_FABRIC")) return *value = 1, kDone;
  return *value = attribute == 102 || attribute == 103 || attribute == 124 || attribute == 19, attribute == 128 ? kInvalid : kDone;
}
int cuDeviceCanAccessPeer(int* can, int device, int peer) { return *can = device != peer, kDone; }
int cuDevicePrimaryCtxRetain(long* context, int device) { return ++retained, *context = device, kDone; }
int cuCtxPushCurrent_v2(long context) { return stack[depth++] = context, kDone; }
int cuCtxPopCurrent_v2(long* context) { return depth ? (*context = stack[--depth], kDone) : kNoContext; }
int cuCtxEnablePeerAccess(long peer, unsigned) {
  if (need() || peer == stack[depth - 1]) return kInvalid;
  return peers++ ? kAlready : kDone;
}

int cuMemGetAllocationGranularity(size_t* bytes, const struct properties* requested, int option) {
  return *bytes = 2 << 20, requested->type == 1 && requested->where.type == 1 && option == 0 ? kDone : kInvalid;
}
int cuMemCreate(unsigned long long* memory, size_t bytes, const struct properties* requested, unsigned long long) {
  if (requested->type != 1 || !shares_by(requested->handle_types) || requested->where.type != 1) return kInvalid;
  if (requested->rdma_capable && requested->where.id != 0) return kInvalid;
  if (refuses("cuMemCreate")) return kNoMemory;
  for_rdma += requested->rdma_capable;
  int fd = memfd_create("fake", MFD_CLOEXEC);
  return *memory = 1000 + fd, ftruncate(fd, bytes) == 0 ? kDone : kInvalid;
}
int cuMemRelease(unsigned long long memory) { return close(memory - 1000); }
int cuMemAddressReserve(char** at, size_t bytes, size_t, unsigned long long, unsigned long long) {
  *at = (char*)mmap(0, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return kDone;
}
int cuMemAddressFree(char* at, size_t bytes) { return munmap(at, bytes); }
int cuMemMap(char* at, size_t bytes, size_t offset, unsigned long long memory, unsigned long long) {
  if (offset + bytes > (size_t)lseek(memory - 1000, 0, SEEK_END)) return kInvalid;
  return mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory - 1000, offset) == at ? kDone : kInvalid;
}
int cuMemUnmap(char* at, size_t bytes) {
  return mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at ? kDone : kInvalid;
}
/* For the test: a bit for each GPU that has been given access since the last question. */
static std::atomic<int> allowed{0};
int fake_allowed(void) { return allowed.exchange(0); }
int cuMemSetAccess(char* at, size_t bytes, const struct access* to, size_t count) {
  if (count != 1 || to->where.type != 1 || to->flags != 3) return kInvalid;
  allowed |= 1 << to->where.id;
  return mprotect(at, bytes, PROT_READ | PROT_WRITE);
}
int cuMemExportToShareableHandle(int* fd, unsigned long long memory, int type, unsigned long long) {
  if (type == kFabric && refuses("export of a fabric handle")) return kNoMemory;
  if (type == kFabric) return snprintf((char*)fd, 64, "/proc/%d/fd/%d", getpid(), int(memory - 1000)) < 0;
  return *fd = dup(memory - 1000), type == kPosixFd ? kDone : kInvalid;
}
int cuMemImportFromShareableHandle(unsigned long long* memory, void* fd, int type) {
  if (refuses("cuMemImportFromShareableHandle")) return kNoMemory;
  if (type == kFabric) return *memory = 1000 + open((const char*)fd, O_RDWR | O_CLOEXEC), *memory < 1000;
  return *memory = 1000 + dup((int)(long)fd), type == kPosixFd ? kDone : kInvalid;
}

/* A multicast object's parts are whole granules on two devices. */
struct team { unsigned devices; size_t bytes; unsigned long long handles, flags; };
int cuMulticastGetGranularity(size_t* bytes, const struct team* requested, int option) {
  return *bytes = 2 << 20, requested->devices == 2 && requested->handles == kPosixFd && !requested->flags && !option ? kDone : kInvalid;
}
int cuMulticastCreate(unsigned long long* object, const struct team* requested) {
  if (requested->devices != 2 || requested->handles != kPosixFd || requested->flags || requested->bytes % (2 << 20)) return kInvalid;
  int fd = memfd_create("team", MFD_CLOEXEC);
  return *object = 1000 + fd, ftruncate(fd, requested->bytes) == 0 ? need() : kInvalid;
}
int cuMulticastAddDevice(unsigned long long, int device) { return device == 10 ? need() : kInvalid; }
int cuMulticastBindMem(unsigned long long object, size_t at, unsigned long long memory, size_t offset, size_t bytes,
                       unsigned long long flags) {
  size_t of_team = (size_t)lseek(object - 1000, 0, SEEK_END), of_memory = (size_t)lseek(memory - 1000, 0, SEEK_END);
  return at || flags || bytes > of_team || offset + bytes > of_memory || offset % (2 << 20) ? kInvalid : need();
}
int cuMulticastUnbind(unsigned long long, int device, size_t at, size_t bytes) {
  return device != 10 || at || bytes % (2 << 20) ? kInvalid : need();
}

/* Before each allocation stands its size. */
enum { kHead = 4096 };
int cuMemAlloc_v2(char** at, size_t bytes) {
  char* memory = need() ? 0 : (char*)calloc(1, kHead + bytes);
  if (memory) memcpy(memory, &bytes, sizeof bytes);
  return *at = memory + kHead, need();
}
int cuMemFree_v2(char* at) { return free(at - kHead), need(); }
int cuMemGetAddressRange_v2(char** begin, size_t* bytes, char* at) {
  return *begin = at, memcpy(bytes, at - kHead, sizeof *bytes), need();
}
int cuIpcGetMemHandle(struct handle* handle, void* at) { return memcpy(handle, &at, sizeof at), need(); }
int cuIpcOpenMemHandle_v2(void** at, struct handle handle, unsigned flags) {
  return memcpy(at, &handle, sizeof *at), flags == 1 ? need() : kInvalid;
}
int cuIpcCloseMemHandle(void*) { return need(); }
int cuMemHostRegister_v2(void*, size_t, unsigned flags) {
  return flags != 3 ? kInvalid : refuses("cuMemHostRegister") ? kNoMemory : need();
}
int cuMemHostUnregister(void*) { return need(); }
int cuMemHostGetDevicePointer_v2(void** at, void* memory, unsigned flags) { return *at = memory, flags ? kInvalid : need(); }
int cuStreamCreateWithPriority(long* stream, unsigned flags, int priority) {
  return *stream = 77, flags == 1 && priority < -5 ? need() : kInvalid;
}
int cuStreamDestroy_v2(long stream) { return stream == 77 ? need() : kInvalid; }
/* For the test: no copy ends until it is let go. */
static volatile int copies_held = 0;
int fake_hold_copies(int held) { copies_held = held; return 0; }
int cuStreamQuery(long stream) {
  return stream != 77 ? kInvalid : copies_held || polls++ % 3 == 0 ? kNotReady : need();
}
/* Tensors of the simulated accelerator are not where their addresses say. */
static void* real(const void* at) {
  static void* (*const translate)(void*) = (void* (*)(void*))dlsym(RTLD_DEFAULT, "fake_device_real");
  return translate ? translate((void*)at) : (void*)at;
}
/* For the test: the bytes that large copies have moved. */
static std::atomic<size_t> copied{0};
size_t fake_copied(void) { return copied.exchange(0); }
int cuMemcpyAsync(void* to, const void* from, size_t bytes, long stream) {
  if (bytes > 976) copied += bytes;
  return memcpy(real(to), real(from), bytes), refuses("cuMemcpyAsync") ? kInvalid : stream == 77 ? need() : kInvalid;
}
/* The simulated accelerator has captures, and a mode for each thread. */
int cuThreadExchangeStreamCaptureMode(int* mode) {
  static int (*const exchange)(int*) = (int (*)(int*))dlsym(RTLD_DEFAULT, "fake_device_exchange_capture_mode");
  static thread_local int alone = 0;
  int before = alone;
  return exchange ? exchange(mode) : (alone = *mode, *mode = before, kDone);
}
/* The streams 101 and 102 are in a capture, which is active or invalid. Beside it the driver says nothing of the legacy
 * stream. */
int cuStreamIsCapturing(long stream, int* status) { return *status = int(stream) - 100, stream ? kDone : 906; }
int cuMemsetD8Async(void* to, unsigned char value, size_t count, long stream) {
  return memset(to, value, count), stream == 77 ? need() : kInvalid;
}
}
