/* Stands for libnvidia-ml.so.1: three GPUs on one NVSwitch. The second one has two lanes at half their rate. The last
 * one has half its lanes up, all of them at half their rate, which its driver reports as one value, and a narrow PCIe
 * link; and the driver lets it and the first one not reach each other. With FAKE_FABRIC="7 2" all of them are in the
 * NVLink cluster 7, clique 2. FAKE_FIRST_BUS moves their buses. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kGpus = 3, kLanes = 18, kSuccess = 0, kInvalid = 2 };

struct pci_info {
  char bus_legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};
struct field_value {
  unsigned field, scope;
  long long timestamp, latency;
  int type, result;
  union {
    double real;
    unsigned number;
    unsigned long long large;
  } value;
};

static int index_of(void* device) { return (int)(size_t)device - 1; }
static int up(void* device, unsigned lane) { return lane < (index_of(device) == 2 ? 9u : 18u); }
static int bus(unsigned number, struct pci_info* info) {
  memset(info, 0, sizeof *info);
  snprintf(info->bus_legacy, sizeof info->bus_legacy, "0000:%02X:00.0", number);
  return kSuccess;
}

int nvmlInit_v2(void) { return kSuccess; }
int nvmlShutdown(void) { return kSuccess; }
const char* nvmlErrorString(int result) { return result ? "refused" : "done"; }
int nvmlSystemGetDriverVersion(char* version, unsigned bytes) { return snprintf(version, bytes, "580.95") < 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { return *count = kGpus, kSuccess; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (index >= kGpus) return kInvalid;
  *device = (void*)(size_t)(index + 1);
  return kSuccess;
}
int nvmlDeviceGetName(void* device, char* name, unsigned bytes) {
  return snprintf(name, bytes, "Fake H100 \"%d\"", index_of(device)) < 0;
}
int nvmlDeviceGetUUID(void* device, char* uuid, unsigned bytes) {
  return snprintf(uuid, bytes, "GPU-%d", index_of(device)) < 0;
}
int nvmlDeviceGetPciInfo_v3(void* device, struct pci_info* info) {
  const char* first = getenv("FAKE_FIRST_BUS");
  return bus((first ? strtoul(first, 0, 16) : 0xfa) + index_of(device), info);
}
struct fabric_info {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};
int nvmlDeviceGetGpuFabricInfoV(void* device, struct fabric_info* info) {
  const char* fabric = getenv("FAKE_FABRIC");
  unsigned cluster = 0, clique = 0;
  if (!device || info->version != (36 | 2 << 24)) return kInvalid;
  if (fabric && sscanf(fabric, "%u %u", &cluster, &clique) != 2) return kInvalid;
  memset(info->cluster, cluster, sizeof info->cluster);
  info->clique = clique;
  info->status = kSuccess;
  info->state = 3;
  return kSuccess;
}
int nvmlDeviceGetCurrPcieLinkGeneration(void* device, unsigned* value) { return *value = device ? 1 : 0, kSuccess; }
int nvmlDeviceGetCurrPcieLinkWidth(void* device, unsigned* value) {
  return *value = index_of(device) == 2 ? 4 : 16, kSuccess;
}
int nvmlDeviceGetMaxPcieLinkGeneration(void* device, unsigned* value) { return *value = device ? 5 : 0, kSuccess; }
int nvmlDeviceGetMaxPcieLinkWidth(void* device, unsigned* value) { return *value = device ? 16 : 0, kSuccess; }
int nvmlDeviceGetNvLinkState(void* device, unsigned lane, int* active) {
  if (lane >= kLanes) return kInvalid;
  return *active = up(device, lane), kSuccess;
}
int nvmlDeviceGetNvLinkVersion(void* device, unsigned lane, unsigned* version) {
  return *version = device && lane < kLanes ? 6 : 0, kSuccess;
}
int nvmlDeviceGetNvLinkCapability(void* device, unsigned lane, int capability, unsigned* has) {
  return *has = device && lane < kLanes && capability == 5, kSuccess;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned lane, struct pci_info* info) {
  return device && lane < kLanes ? bus(0xa0, info) : kInvalid;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void* device, unsigned lane, int* type) {
  return *type = device && lane < kLanes ? 2 : 255, kSuccess;
}
int nvmlDeviceGetFieldValues(void* device, int count, struct field_value* values) {
  const int last = index_of(device) == 2;
  if (!device || count != 1 || values->field != (last ? 90 : 164) || values->scope >= kLanes) return kInvalid;
  const int slow = last || (index_of(device) == 1 && (values->scope == 3 || values->scope == 5));
  values->result = kSuccess;
  values->value.number = slow ? 13281 : 26562;
  return kSuccess;
}
int nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) {
  *major = device ? 9 : 0;
  *minor = 0;
  return kSuccess;
}
int nvmlDeviceGetTopologyCommonAncestor(void* a, void* b, int* level) {
  return *level = index_of(a) + index_of(b) == 1 ? 10 : 50, kSuccess;
}
int nvmlDeviceGetP2PStatus(void* a, void* b, int capability, int* status) {
  return *status = capability == 1 && index_of(a) + index_of(b) == 2 ? 1 : 0, kSuccess;
}
