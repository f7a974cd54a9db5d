/* CUDA libraries that allocate host memory, copy within it, and compute nothing. build.py adds, for every other
   symbol that ONNX Runtime's CUDA provider imports, a function that returns 0 (success).

   STUB_SM=90            compute capability of the devices
   STUB_DEVICES=1        how many there are
   STUB_TRACE=FILE       one line a call: kernels by name, copies, synchronisations, captures
   While a stream captures, what CUDA forbids then fails here too, with CUDA's error numbers. So does a process that was
   forked from one which had used the device. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define OUT(type) __attribute__((visibility("default"))) type
static FILE *trace_file(void) {
  static FILE *file; static int known;
  if (!known) { const char *path = getenv("STUB_TRACE"); file = path ? fopen(path, "a") : NULL; known = 1; }
  return file;
}
__attribute__((unused)) static void note(const char *format, ...) {
  FILE *file = trace_file();
  if (!file) return;
  char line[2048]; va_list list;
  va_start(list, format); vsnprintf(line, sizeof line, format, list); va_end(list);
  fprintf(file, "%ld %s\n", syscall(SYS_gettid), line); fflush(file);
}
void stub_note(const char *name) { note("%s", name); }
__attribute__((unused)) static int make(void **handle) { *handle = calloc(1, 4096); return 0; }

#ifdef LIB_cudart
#include <cuda_runtime_api.h>

static int sm(void) { const char *text = getenv("STUB_SM"); return text ? atoi(text) : 90; }
static __thread cudaError_t last = cudaSuccess;
static cudaError_t fail(const char *what, cudaError_t error) { note("REFUSED %s -> %d", what, error); return last = error; }
/* The process whose device this is: the first that calls any of the functions by which programs begin. */
static pid_t user;
static int inherited(void) {
  if (!user) user = getpid();
  return user != getpid();
}
#define OWN(name) if (inherited()) return fail(name " in a forked process", cudaErrorInitializationError)

/* devices: each thread has a current one, on which it allocates and launches */
#define MOST_DEVICES 16
static int devices(void) { const char *text = getenv("STUB_DEVICES"); return text ? atoi(text) : 1; }
static __thread int current;

/* memory */
enum { PAGEABLE, PINNED, DEVICE };
typedef struct Block { char *start; size_t size; int kind, device; struct Block *next; } Block;
static Block *blocks; static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t on_device[MOST_DEVICES];
static int device_of(const void *address) {
  int device = -1;
  pthread_mutex_lock(&lock);
  for (Block *b = blocks; b; b = b->next)
    if (b->kind == DEVICE && (const char *)address >= b->start && (const char *)address < b->start + b->size) { device = b->device; break; }
  pthread_mutex_unlock(&lock);
  return device;
}
static int kind_of(const void *address) {
  int kind = PAGEABLE;
  pthread_mutex_lock(&lock);
  for (Block *b = blocks; b; b = b->next)
    if ((const char *)address >= b->start && (const char *)address < b->start + b->size) { kind = b->kind; break; }
  pthread_mutex_unlock(&lock);
  return kind;
}
static void *take(size_t size, int kind) {
  void *start = NULL;
  if (posix_memalign(&start, 512, size ? size : 1)) return NULL;
  memset(start, 0, size ? size : 1);
  Block *b = malloc(sizeof *b);
  pthread_mutex_lock(&lock);
  *b = (Block){start, size ? size : 1, kind, current, blocks}; blocks = b; on_device[current] += kind == DEVICE ? size : 0;
  pthread_mutex_unlock(&lock);
  return start;
}
static void drop(void *start) {
  pthread_mutex_lock(&lock);
  for (Block **b = &blocks; *b; b = &(*b)->next)
    if ((*b)->start == start) {
      Block *match = *b; *b = match->next; on_device[match->device] -= match->kind == DEVICE ? match->size : 0; free(match); free(start); break;
    }
  pthread_mutex_unlock(&lock);
}

/* streams and captures */
struct Stream { int capturing, broken, mode, device; long thread; };
static struct Stream *captures[64]; static int capture_count;
static struct Stream *stream_of(cudaStream_t s) { return (uintptr_t)s > 2 ? (struct Stream *)s : NULL; }
static int is_capturing(cudaStream_t s) { struct Stream *x = stream_of(s); return x && x->capturing; }
/* A call that CUDA forbids while a capture runs: in mode global (0) from any thread, in mode thread local (1) from its own. */
static int forbidden(void) {
  long me = syscall(SYS_gettid);
  for (int i = 0; i < capture_count; i++)
    if (captures[i]->mode == 0 || (captures[i]->mode == 1 && captures[i]->thread == me)) { captures[i]->broken = 1; return 1; }
  return 0;
}
#define UNSAFE(name) if (forbidden()) return fail(name, cudaErrorStreamCaptureUnsupported)

/* The copies of a captured graph that read the host's memory, with what that held then. */
struct Copy { void *to; const void *from; size_t size; void *held; struct Copy *next; };
struct Graph { struct Copy *copies; };
static struct Copy *pending; /* of the one capture at a time that this knows */
static void remember(void *to, const void *from, size_t n) {
  struct Copy *c = malloc(sizeof *c);
  *c = (struct Copy){to, from, n, malloc(n ? n : 1), pending}; memcpy(c->held, from, n); pending = c;
}

OUT(cudaError_t) cudaStreamCreate(cudaStream_t *s) { OWN("cudaStreamCreate"); *s = (cudaStream_t)calloc(1, sizeof(struct Stream)); ((struct Stream *)*s)->device = current; note("stream %p on %d", (void *)*s, current); return 0; }
OUT(cudaError_t) cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { (void)flags; return cudaStreamCreate(s); }
OUT(cudaError_t) cudaStreamDestroy(cudaStream_t s) { (void)s; return 0; }
OUT(cudaError_t) cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { (void)f; note("wait-event %p %p", (void *)s, (void *)e); return 0; }
OUT(cudaError_t) cudaStreamSynchronize(cudaStream_t s) {
  note("sync-stream %p", (void *)s);
  if (is_capturing(s)) { stream_of(s)->broken = 1; return fail("cudaStreamSynchronize", cudaErrorStreamCaptureUnsupported); }
  return 0;
}
OUT(cudaError_t) cudaDeviceSynchronize(void) { note("sync-device"); UNSAFE("cudaDeviceSynchronize"); return 0; }
OUT(cudaError_t) cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
  struct Stream *x = stream_of(s);
  note("BEGIN-CAPTURE %p mode %d on %d", (void *)s, mode, current);
  if (!x) return fail("cudaStreamBeginCapture", cudaErrorStreamCaptureUnsupported);
  x->capturing = 1; x->broken = 0; x->mode = mode; x->thread = syscall(SYS_gettid); captures[capture_count++] = x;
  return 0;
}
OUT(cudaError_t) cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
  struct Stream *x = stream_of(s);
  if (!x || !x->capturing) return fail("cudaStreamEndCapture", cudaErrorIllegalState);
  note("END-CAPTURE %p broken %d", (void *)s, x->broken);
  x->capturing = 0;
  for (int i = 0; i < capture_count; i++) if (captures[i] == x) captures[i] = captures[--capture_count];
  if (x->broken) { *graph = NULL; return fail("cudaStreamEndCapture", cudaErrorStreamCaptureInvalidated); }
  struct Graph *g = calloc(1, sizeof *g);
  g->copies = pending; pending = NULL; *graph = (cudaGraph_t)g;
  return 0;
}
OUT(cudaError_t) cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = is_capturing(s) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; return 0;
}
OUT(cudaError_t) cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) { (void)f; note("graph-instantiate"); *e = (cudaGraphExec_t)g; return 0; }
OUT(cudaError_t) cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
  note("GRAPH-LAUNCH %p %p on %d", (void *)e, (void *)s, stream_of(s) ? stream_of(s)->device : current);
  for (struct Copy *c = ((struct Graph *)e)->copies; c; c = c->next) {
    if (memcmp(c->held, c->from, c->size)) note("STALE: a replay copies %zu bytes from %p that were others when it was captured", c->size, c->from);
    memmove(c->to, c->from, c->size);
  }
  return 0;
}
OUT(cudaError_t) cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { note("host-func %p%s", (void *)s, is_capturing(s) ? " CAPTURED" : ""); f(data); return 0; }
OUT(cudaError_t) cudaEventCreate(cudaEvent_t *e) { return make((void **)e); }
OUT(cudaError_t) cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { (void)f; return make((void **)e); }
OUT(cudaError_t) cudaEventSynchronize(cudaEvent_t e) { note("sync-event %p", (void *)e); return 0; }
OUT(cudaError_t) cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { (void)a; (void)b; *ms = 1; return 0; }

OUT(cudaError_t) cudaMalloc(void **p, size_t n) { note("malloc %zu", n); OWN("cudaMalloc"); UNSAFE("cudaMalloc"); *p = take(n, DEVICE); return *p ? 0 : cudaErrorMemoryAllocation; }
OUT(cudaError_t) cudaMallocFromPoolAsync(void **p, size_t n, cudaMemPool_t pool, cudaStream_t s) { (void)pool; note("malloc-async %zu %p", n, (void *)s); *p = take(n, DEVICE); return *p ? 0 : cudaErrorMemoryAllocation; }
OUT(cudaError_t) cudaMallocHost(void **p, size_t n) { note("malloc-host %zu", n); OWN("cudaMallocHost"); UNSAFE("cudaMallocHost"); *p = take(n, PINNED); return 0; }
OUT(cudaError_t) cudaHostAlloc(void **p, size_t n, unsigned f) { (void)f; note("malloc-host %zu", n); OWN("cudaHostAlloc"); UNSAFE("cudaHostAlloc"); *p = take(n, PINNED); return 0; }
OUT(cudaError_t) cudaFree(void *p) { note("free"); if (p) { UNSAFE("cudaFree"); } drop(p); return 0; }
OUT(cudaError_t) cudaFreeAsync(void *p, cudaStream_t s) { (void)s; drop(p); return 0; }
OUT(cudaError_t) cudaFreeHost(void *p) { UNSAFE("cudaFreeHost"); drop(p); return 0; }
OUT(cudaError_t) cudaMemGetInfo(size_t *f, size_t *t) { *t = 141000000000ull; *f = *t - on_device[current]; return 0; }
OUT(cudaError_t) cudaMemPoolCreate(cudaMemPool_t *p, const struct cudaMemPoolProps *x) { (void)x; return make((void **)p); }
OUT(cudaError_t) cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { (void)p; (void)a; *(uint64_t *)v = 0; return 0; }
OUT(cudaError_t) cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  int kind = kind_of(p); memset(a, 0, sizeof *a);
  a->type = kind == DEVICE ? cudaMemoryTypeDevice : kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->devicePointer = kind == PAGEABLE ? NULL : (void *)p; a->hostPointer = kind == DEVICE ? NULL : (void *)p; a->device = kind == DEVICE ? device_of(p) : 0; return 0;
}

/* copies: done at once; in a capture they are done too, and named by the kinds of memory, because a replay reads anew */
static const char *const KIND[] = {"pageable", "pinned", "device"};
static void copied(const char *what, void *to, const void *from, size_t n, cudaStream_t s) {
  int one = device_of(from), other = device_of(to); char peers[40] = "";
  if (one >= 0 && other >= 0 && one != other) snprintf(peers, sizeof peers, " from %d to %d", one, other);
  note("%s %s->%s %zu%s%s", what, KIND[kind_of(from)], KIND[kind_of(to)], n, peers, is_capturing(s) ? " CAPTURED" : "");
}
OUT(cudaError_t) cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) {
  (void)k; copied("copy", to, from, n, NULL); UNSAFE("cudaMemcpy"); memmove(to, from, n); return 0;
}
OUT(cudaError_t) cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
  (void)k; copied("copy-async", to, from, n, s);
  if (!s && forbidden()) return fail("cudaMemcpyAsync on the default stream", cudaErrorStreamCaptureImplicit);
  if (is_capturing(s) && kind_of(from) != DEVICE) remember(to, from, n);
  memmove(to, from, n); return 0;
}
OUT(cudaError_t) cudaMemcpy2DAsync(void *to, size_t tp, const void *from, size_t fp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t s) {
  (void)k; copied("copy2d-async", to, from, w * h, s);
  for (size_t i = 0; i < h; i++) memmove((char *)to + i * tp, (const char *)from + i * fp, w);
  return 0;
}
OUT(cudaError_t) cudaMemcpyFromSymbol(void *to, const void *x, size_t n, size_t o, enum cudaMemcpyKind k) { (void)x; (void)o; (void)k; memset(to, 0, n); return 0; }
OUT(cudaError_t) cudaMemset(void *p, int v, size_t n) { note("memset %zu", n); UNSAFE("cudaMemset"); memset(p, v, n); return 0; }
OUT(cudaError_t) cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) { note("memset-async %zu%s", n, is_capturing(s) ? " CAPTURED" : ""); memset(p, v, n); return 0; }

/* the device */
OUT(cudaError_t) cudaGetDeviceCount(int *n) { OWN("cudaGetDeviceCount"); *n = devices(); return 0; }
OUT(cudaError_t) cudaGetDevice(int *n) { OWN("cudaGetDevice"); *n = current; return 0; }
OUT(cudaError_t) cudaSetDevice(int n) {
  OWN("cudaSetDevice");
  if (n < 0 || n >= devices() || n >= MOST_DEVICES) return fail("cudaSetDevice", cudaErrorInvalidDevice);
  current = n; return 0;
}
OUT(cudaError_t) cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
OUT(cudaError_t) cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
OUT(cudaError_t) cudaGetLastError(void) { cudaError_t was = last; last = 0; return was; }
OUT(cudaError_t) cudaPeekAtLastError(void) { return last; }
OUT(const char *) cudaGetErrorName(cudaError_t e) { static __thread char t[40]; snprintf(t, sizeof t, "cudaError %d (stub)", e); return t; }
OUT(const char *) cudaGetErrorString(cudaError_t e) { return cudaGetErrorName(e); }
OUT(cudaError_t) cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  (void)d; memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA stub"); p->totalGlobalMem = 141000000000ull; p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32;
  p->maxThreadsPerBlock = 1024; p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535; p->totalConstMem = 65536; p->major = sm() / 10; p->minor = sm() % 10;
  p->textureAlignment = 512; p->multiProcessorCount = 132; p->unifiedAddressing = 1; p->memoryBusWidth = 6144; p->l2CacheSize = 62914560;
  p->maxThreadsPerMultiProcessor = 2048; p->sharedMemPerMultiprocessor = sm() >= 90 ? 233472 : 102400; p->regsPerMultiprocessor = 65536; p->managedMemory = 1;
  p->concurrentKernels = 1; p->asyncEngineCount = 3; p->cooperativeLaunch = 1; p->sharedMemPerBlockOptin = sm() >= 90 ? 232448 : 101376; p->maxBlocksPerMultiProcessor = 32;
  p->memoryPoolsSupported = 1; p->streamPrioritiesSupported = 1;
  return 0;
}
OUT(cudaError_t) cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  struct cudaDeviceProp p; cudaGetDeviceProperties(&p, d);
  switch ((int)a) {
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMultiProcessorCount: *v = p.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: *v = 65536; break;
    case cudaDevAttrMaxGridDimX: *v = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrCooperativeLaunch: case cudaDevAttrUnifiedAddressing: *v = 1; break;
    case cudaDevAttrL2CacheSize: *v = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    default: *v = 0; note("attribute %d unknown, 0", a);
  }
  return 0;
}
OUT(cudaError_t) cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long g, enum cudaDriverEntryPointQueryResult *r) {
  (void)v; (void)g; *f = dlsym(RTLD_DEFAULT, name); note("entry point %s %s", name, *f ? "" : "ABSENT");
  if (r) *r = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return 0;
}

/* kernels: known by name, not run */
#define SLOTS (1 << 18)
static struct { const void *host; const char *name; } kernels[SLOTS];
static const char *kernel_name(const void *host) {
  size_t i = ((uintptr_t)host * 0x9E3779B97F4A7C15ull) >> 46;
  while (kernels[i].host) { if (kernels[i].host == host) return kernels[i].name; i = (i + 1) & (SLOTS - 1); }
  return "?";
}
OUT(void **) __cudaRegisterFatBinary(void *f) { (void)f; return calloc(1, 64); }
OUT(void) __cudaRegisterFatBinaryEnd(void **h) { (void)h; }
OUT(void) __cudaUnregisterFatBinary(void **h) { (void)h; }
OUT(void) __cudaRegisterVar(void **h, char *v, char *a, const char *n, int e, size_t s, int c, int g) { (void)h; (void)v; (void)a; (void)n; (void)e; (void)s; (void)c; (void)g; }
OUT(void) __cudaRegisterFunction(void **h, const char *host, char *d, const char *name, int t, void *ti, void *bi, void *bd, void *gd, int *w) {
  (void)h; (void)d; (void)t; (void)ti; (void)bi; (void)bd; (void)gd; (void)w;
  size_t i = ((uintptr_t)host * 0x9E3779B97F4A7C15ull) >> 46;
  while (kernels[i].host) i = (i + 1) & (SLOTS - 1);
  kernels[i].host = host; kernels[i].name = strdup(name);
}
/* A grid without blocks is an error in CUDA: kernels over empty tensors must not be launched. */
static int is_empty(dim3 g) { return !g.x || !g.y || !g.z; }
/* So is a kernel on a stream of another device than the thread's. */
static int is_foreign(cudaStream_t s) { return stream_of(s) && stream_of(s)->device != current; }
static void launched(const void *f, cudaStream_t s) { if (trace_file()) note("kernel %p%s %.1500s", (void *)s, is_capturing(s) ? " CAPTURED" : "", kernel_name(f)); }
OUT(cudaError_t) __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return 0; }
OUT(cudaError_t) __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) { if (is_empty(g)) return fail(kernel_name(k), cudaErrorInvalidConfiguration); if (is_foreign(s)) return fail(kernel_name(k), cudaErrorInvalidResourceHandle); (void)b; (void)a; (void)m; launched(k, s); return 0; }
OUT(cudaError_t) cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) { if (is_empty(g)) return fail(kernel_name(f), cudaErrorInvalidConfiguration); if (is_foreign(s)) return fail(kernel_name(f), cudaErrorInvalidResourceHandle); (void)b; (void)a; (void)m; launched(f, s); return 0; }
OUT(cudaError_t) cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) { if (is_empty(g)) return fail(kernel_name(f), cudaErrorInvalidConfiguration); if (is_foreign(s)) return fail(kernel_name(f), cudaErrorInvalidResourceHandle); (void)b; (void)a; (void)m; launched(f, s); return 0; }
OUT(cudaError_t) cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { if (is_empty(c->gridDim)) return fail(kernel_name(f), cudaErrorInvalidConfiguration); if (is_foreign(c->stream)) return fail(kernel_name(f), cudaErrorInvalidResourceHandle); (void)a; launched(f, c->stream); return 0; }
static __thread struct { dim3 g, b; size_t m; void *s; } call;
OUT(unsigned) __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, struct CUstream_st *s) { call.g = g; call.b = b; call.m = m; call.s = s; return 0; }
OUT(cudaError_t) __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *m, void *s) { *g = call.g; *b = call.b; *m = call.m; *(void **)s = call.s; return 0; }
OUT(cudaError_t) cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  (void)f; memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->ptxVersion = a->binaryVersion = sm(); a->maxDynamicSharedSizeBytes = 49152; return 0;
}
OUT(cudaError_t) cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m, unsigned x) { (void)f; (void)b; (void)m; (void)x; *n = 1; return 0; }
OUT(cudaError_t) cudaLibraryLoadData(cudaLibrary_t *l, const void *c, enum cudaJitOption *jo, void **jv, unsigned jn, enum cudaLibraryOption *lo, void **lv, unsigned ln) {
  (void)c; (void)jo; (void)jv; (void)jn; (void)lo; (void)lv; (void)ln; return make((void **)l);
}
OUT(cudaError_t) cudaLibraryGetKernel(cudaKernel_t *k, cudaLibrary_t l, const char *n) { (void)l; (void)n; return make((void **)k); }
#endif

#ifdef LIB_cublas
OUT(int) cublasCreate_v2(void **h) { return make(h); }
OUT(int) cublasGetMathMode(void *h, int *m) { (void)h; *m = 0; return 0; }
OUT(const char *) cublasGetStatusName(int s) { (void)s; return "stub"; }
OUT(const char *) cublasGetStatusString(int s) { (void)s; return "stub"; }
#endif

#ifdef LIB_cublasLt
OUT(int) cublasLtCreate(void **h) { return make(h); }
OUT(int) cublasLtMatmulDescCreate(void **h, int a, int b) { (void)a; (void)b; return make(h); }
OUT(int) cublasLtMatmulPreferenceCreate(void **h) { return make(h); }
OUT(int) cublasLtMatrixLayoutCreate(void **h, int t, uint64_t r, uint64_t c, int64_t l) { (void)t; (void)r; (void)c; (void)l; return make(h); }
OUT(int) cublasLtMatrixTransformDescCreate(void **h, int t) { (void)t; return make(h); }
typedef struct { uint64_t algo[8]; size_t workspace; int state; float waves; int reserved[4]; } Algorithm;
OUT(int) cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int asked, Algorithm *chosen, int *count) {
  (void)h; (void)d; (void)a; (void)b; (void)c; (void)e; (void)p;
  if (asked > 0) memset(chosen, 0, sizeof *chosen);
  *count = asked > 0; return 0;
}
#endif

#ifdef LIB_cudnn
OUT(size_t) cudnnGetVersion(void) { return 91200; }
OUT(size_t) cudnnGetCudartVersion(void) { return 13000; }
OUT(const char *) cudnnGetErrorString(int s) { (void)s; return "stub"; }
OUT(void) cudnnGetLastErrorString(char *m, size_t n) { if (n) *m = 0; }
OUT(int) cudnnCreate(void **h) { return make(h); }
static void *stream;
OUT(int) cudnnSetStream(void *h, void *s) { (void)h; stream = s; return 0; }
OUT(int) cudnnGetStream(void *h, void **s) { (void)h; *s = stream; return 0; }
OUT(int) cudnnGetReductionWorkspaceSize(void *h, void *r, void *a, void *c, size_t *n) { (void)h; (void)r; (void)a; (void)c; *n = 256; return 0; }
OUT(int) cudnnGetReductionIndicesSize(void *h, void *r, void *a, void *c, size_t *n) { (void)h; (void)r; (void)a; (void)c; *n = 256; return 0; }
OUT(int) cudnnDropoutGetStatesSize(void *h, size_t *n) { (void)h; *n = 256; return 0; }
/* Every graph finds one engine, which does nothing. STUB_CUDNN_GRAPHS=0: none. Types: 3 int64, 15 descriptor. */
OUT(int) cudnnBackendCreateDescriptor(int t, void **d) { (void)t; return make(d); }
OUT(int) cudnnBackendDestroyDescriptor(void *d) { (void)d; return 0; }
OUT(int) cudnnBackendSetAttribute(void) { return 0; }
OUT(int) cudnnBackendFinalize(void *d) { (void)d; return 0; }
OUT(int) cudnnBackendExecute(void *h, void *p, void *v) { (void)h; (void)p; (void)v; note("cudnnBackendExecute"); return 0; }
OUT(int) cudnnBackendGetAttribute(void *d, int a, int t, int64_t asked, int64_t *count, void *values) {
  const char *none = getenv("STUB_CUDNN_GRAPHS"); (void)d;
  if (a == 202) note("cudnn looks for engines");
  int64_t n = none && *none == '0' ? 0 : t == 15 || t == 3 ? 1 : 0;
  if (t == 3 && values && asked > 0) *(int64_t *)values = 0;
  if (count) *count = n;
  return 0;
}
#define CREATE(what) OUT(int) cudnnCreate##what##Descriptor(void **h) { return make(h); }
CREATE(Activation) CREATE(Convolution) CREATE(Dropout) CREATE(Filter) CREATE(LRN) CREATE(Pooling) CREATE(RNN) CREATE(RNNData) CREATE(ReduceTensor) CREATE(Tensor)
#endif
