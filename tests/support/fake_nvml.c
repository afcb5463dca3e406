/* A driver library of two boards, as nvidia-ml-py calls it: what the signatures of nvml.h say.

   FAKE_NVML_LOST: the second board is off the bus; `later`: once the driver has told its errors.
   Nothing can be asked of a lost one but what the driver keeps. FAKE_NVML_DEAD: so fails all else
   that is asked of the first one. FAKE_NVML_PID: computes on the first one.
   Calls that are missing here are those that an old driver does not know. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, LOST = 15, UNKNOWN = 999 };
typedef unsigned long long u64;
typedef struct { int number; } *Board;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char place[32]; } Pci;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } Process;
typedef struct { Board device; u64 type, data; unsigned gpu_instance, compute_instance; } Event;
static struct { int number; } boards[2] = {{0}, {1}};
static int events_left = 2;

static int gone(Board board) {
  const char *lost = getenv("FAKE_NVML_LOST");
  return board->number == 1 && lost && (strcmp(lost, "later") || !events_left);
}
static int fails(Board board) {
  return gone(board) ? LOST : board->number == 0 && getenv("FAKE_NVML_DEAD") ? UNKNOWN : OK;
}
#define READ(out, value) do { if (fails(board)) return fails(board); *(out) = (value); return OK; } while (0)

int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "570.86.15"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, Board *board) { *board = (Board)&boards[number]; return gone(*board) ? LOST : OK; }
int nvmlDeviceGetPciInfo_v3(Board board, Pci *pci) {
  if (gone(board)) return LOST;
  snprintf(pci->place, sizeof pci->place, "00000000:%s:00.0", board->number ? "B3" : "3B");
  return OK;
}
int nvmlDeviceGetUUID(Board board, char *text, unsigned size) { if (fails(board)) return fails(board); snprintf(text, size, "GPU-%d", board->number); return OK; }
int nvmlDeviceGetName(Board board, char *text, unsigned size) { if (fails(board)) return fails(board); snprintf(text, size, "NVIDIA H100"); return OK; }
int nvmlDeviceGetTotalEccErrors(Board board, unsigned type, unsigned counter, u64 *count) {
  READ(count, counter == 0 ? (type ? 2 : 70) : 999);
}
int nvmlDeviceGetRemappedRows(Board board, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  if (fails(board)) return fails(board);
  *corrected = 5, *uncorrected = 2, *pending = 1, *failed = 0;
  return OK;
}
int nvmlDeviceGetRetiredPagesPendingStatus(Board board, unsigned *pending) { return NOT_SUPPORTED; }
int nvmlDeviceGetCurrentClocksThrottleReasons(Board board, u64 *reasons) { READ(reasons, 0x48); }
int nvmlDeviceGetClockInfo(Board board, unsigned kind, unsigned *mhz) { READ(mhz, kind == 1 ? 1200 : 1); }
int nvmlDeviceGetMaxClockInfo(Board board, unsigned kind, unsigned *mhz) { READ(mhz, kind == 1 ? 1980 : 1); }
int nvmlDeviceGetTemperature(Board board, unsigned sensor, unsigned *celsius) { READ(celsius, 88); }
int nvmlDeviceGetPowerUsage(Board board, unsigned *milliwatts) { READ(milliwatts, 423500); }
int nvmlDeviceGetMemoryInfo(Board board, Memory *memory) {
  if (fails(board)) return fails(board);
  memory->total = 80ull << 30, memory->used = 3ull << 30, memory->free = 77ull << 30;
  return OK;
}
int nvmlDeviceGetUtilizationRates(Board board, unsigned *percent) {
  if (fails(board)) return fails(board);
  percent[0] = 97, percent[1] = 41;
  return OK;
}
int nvmlDeviceGetMigMode(Board board, unsigned *now, unsigned *pending) {
  if (fails(board)) return fails(board);
  *now = *pending = 0;
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Board board, unsigned *count, Process *found) {
  if (fails(board)) return fails(board);
  const char *pid = getenv("FAKE_NVML_PID");
  unsigned room = *count;
  *count = pid && board->number == 0;
  if (!*count) return OK;
  if (!room) return INSUFFICIENT_SIZE;
  memset(found, 0, sizeof *found);
  found->pid = atoi(pid), found->used = 3ull << 30;
  return OK;
}
int nvmlEventSetCreate(void **set) { *set = boards; return OK; }
int nvmlDeviceRegisterEvents(Board board, u64 types, void *set) { return types == 8 ? OK : NOT_SUPPORTED; }
int nvmlEventSetWait_v2(void *set, Event *event, unsigned timeout_ms) {
  if (!events_left) return TIMEOUT;
  event->device = (Board)&boards[1], event->type = 8, event->data = events_left-- == 2 ? 48 : 79;
  return OK;
}
