/** The names of the commands. */

export const CommandIDs = {
  save: 'gpuckpt:save',
  restore: 'gpuckpt:restore',
  restoreLatest: 'gpuckpt:restore-latest',
  restoreJob: 'gpuckpt:restore-job',
  resume: 'gpuckpt:resume',
  rename: 'gpuckpt:rename',
  pin: 'gpuckpt:pin',
  compare: 'gpuckpt:compare',
  sleep: 'gpuckpt:sleep',
  wake: 'gpuckpt:wake',
  hibernate: 'gpuckpt:hibernate',
  keepAwake: 'gpuckpt:keep-awake',
  sleepAfter: 'gpuckpt:sleep-after',
  fork: 'gpuckpt:fork',
  forkSnapshot: 'gpuckpt:fork-snapshot',
  share: 'gpuckpt:share',
  export: 'gpuckpt:export',
  fetch: 'gpuckpt:fetch',
  import: 'gpuckpt:import',
  remove: 'gpuckpt:remove',
  removeAll: 'gpuckpt:remove-several',
  describe: 'gpuckpt:describe',
  show: 'gpuckpt:show',
  doctor: 'gpuckpt:doctor'
} as const;
