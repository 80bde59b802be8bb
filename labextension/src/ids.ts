/** The names of the commands. */

export const CommandIDs = {
  save: 'gpuckpt:save',
  restore: 'gpuckpt:restore',
  restoreLatest: 'gpuckpt:restore-latest',
  remove: 'gpuckpt:remove',
  show: 'gpuckpt:show',
  doctor: 'gpuckpt:doctor'
} as const;
