// SPDX-License-Identifier: Apache-2.0
// A CUDA driver without a GPU: everything succeeds, and the last launch can be read back.

#include <stdint.h>
#include <string.h>

#define MOST 4096

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  struct { int id; char pad[4]; char value[64]; } *attributes;
  unsigned num_attributes;
} Config;

static size_t sizes[MOST], num_sizes;
static unsigned char seen[MOST * 8];
static size_t num_seen;
static uintptr_t handles = 1000;

// What each parameter of the next launches takes; the driver itself is not told.
void stub_parameters(const size_t *bytes, size_t count) {
  memcpy(sizes, bytes, count * sizeof *bytes);
  num_sizes = count;
}

// The last launch: dimensions, shared memory, stream, function, attributes, parameters.
size_t stub_launch(unsigned char *to) {
  memcpy(to, seen, num_seen);
  return num_seen;
}

static void note(const void *from, size_t bytes) {
  memcpy(seen + num_seen, from, bytes);
  num_seen += bytes;
}

int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
  (void)extra;
  num_seen = 0;
  note(config->grid, sizeof config->grid);
  note(config->block, sizeof config->block);
  note(&config->shared, sizeof config->shared);
  note(&config->stream, sizeof config->stream);
  note(&function, sizeof function);
  note(&config->num_attributes, sizeof config->num_attributes);
  for (unsigned i = 0; i < config->num_attributes; i++) {
    note(&config->attributes[i].id, sizeof(int));
    note(config->attributes[i].value, sizeof(int));
  }
  for (size_t i = 0; i < num_sizes; i++) note(parameters[i], sizes[i]);
  return 0;
}

int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *shape,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
                           int interleave, int swizzle, int promotion, int fill) {
  uint64_t numbers[16] = {(uint64_t)address, type, rank, interleave, swizzle, promotion, fill};
  for (unsigned i = 0; i < rank && i < 3; i++) {
    numbers[7 + i] = shape[i];
    numbers[10 + i] = i + 1 < rank ? strides[i] : 0;
    numbers[13 + i] = box[i] | (uint64_t)steps[i] << 32;
  }
  memcpy(map, numbers, sizeof numbers);
  return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
  (void)module, (void)name;
  *function = (void *)++handles;
  return 0;
}

int cuModuleLoadData(void **module, const void *image) {
  (void)image;
  *module = (void *)++handles;
  return 0;
}

int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return (void)device, *context = (void *)1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuGetErrorString(int error, const char **text) { return (void)error, *text = "stub", 0; }

// Shared memory, among others: as much as an H100 has.
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)attribute, (void)device;
  return *value = 232448, 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  (void)function;
  return *value = attribute == 0 ? 1024 : 0, 0;  // 0: threads at most
}

int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t pointer) {
  (void)attribute;
  return *value = pointer, 0;
}

#define SUCCEEDS(name) \
  int name(void) { return 0; }
SUCCEEDS(cuInit)
SUCCEEDS(cuDriverGetVersion)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuCtxSetLimit)
SUCCEEDS(cuCtxGetLimit)
SUCCEEDS(cuCtxGetDevice)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuOccupancyMaxActiveClusters)
SUCCEEDS(cuStreamIsCapturing)
SUCCEEDS(cuTensorMapEncodeIm2col)
