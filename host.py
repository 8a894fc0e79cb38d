import json,sys,glob,re,numpy as np
case=sys.argv[1]
for p in sorted(glob.glob(f'/tmp/blind/2/{case}/*.json'),key=lambda s:int(re.findall(r'(?:rank|worker)(\d+)',s)[0])):
    d=json.load(open(p)); e=d['traceEvents']
    r=sorted([(v['ts'],v['dur'],v['name'],v['tid']) for v in e if v.get('cat') in('cuda_runtime','Runtime') and v.get('ph')=='X'])
    l=[x for x in r if 'Launch' in x[2]]
    ts=np.array([float(x[0]) for x in l]); du=np.array([float(x[1]) for x in l])
    sp=np.diff(ts); gap=ts[1:]-(ts[:-1]+du[:-1])
    s=[x for x in r if 'Sync' in x[2]]
    names={}
    print(p[-12:],'launchdur med/mean %.2f %.2f'%(np.median(du),du.mean()),'spacing p10/med/p75/p90/p99 ',np.percentile(sp,[10,50,75,90,99]).round(1),'gap med %.2f'%np.median(gap),'span>1ms',(sp>1000).sum(),'sum>100us<20ms ms %.1f'%(sp[(sp>100)&(sp<20000)].sum()/1e3))
    print('   syncs',[(round((x[0]-r[0][0])/1e3,1),round(x[1]/1e3,2)) for x in s][:60])
    big=np.argsort(-sp)[:10]; print('   big spacings (at ms, ms)',sorted([(round((ts[i]-r[0][0])/1e3,1),round(sp[i]/1e3,1)) for i in big]))
